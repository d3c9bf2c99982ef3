use proptest::prelude::*;

use super::*;
use crate::name::ObjectName;

fn name() -> ObjectName {
    ObjectName::new([&b"a b"[..], b"c"]).unwrap()
}

fn put(text: &str, origin: Origin) -> String {
    match Target::parse(text, origin) {
        Ok(Target::Put(put)) => put.url(&name()).unwrap().to_string(),
        other => panic!("{text}: {other:?}"),
    }
}

fn s3(text: &str) -> S3Target {
    match Target::parse(text, Origin::CommandLine) {
        Ok(Target::S3(s3)) => s3,
        other => panic!("{text}: {other:?}"),
    }
}

#[test]
fn files_are_put_below_a_base_or_into_a_template() {
    for (text, expected) in [
        ("http://h:81/", "http://h:81/a%20b/c"),
        ("HTTP://H/", "http://h/a%20b/c"),
        ("https://h/x/y/", "https://h/x/y/a%20b/c"),
        ("https://[::1]:8443/x/", "https://[::1]:8443/x/a%20b/c"),
        ("https://h/x/{path}.new", "https://h/x/a%20b/c.new"),
    ] {
        assert_eq!(put(text, Origin::CommandLine), expected);
    }
    let signed = "https://h/container/{path}?sv=1&sig=a%2Fb";
    assert_eq!(put(signed, Origin::File), "https://h/container/a%20b/c?sv=1&sig=a%2Fb");
    assert_eq!(put("https://h/up?to={path}&key=s", Origin::File), "https://h/up?to=a%20b/c&key=s");
}

#[test]
fn buckets() {
    let target = s3("s3://my.bucket/a/b%20c/?endpoint=http://127.0.0.1:9000&region=eu-west-1");
    assert_eq!(
        (target.bucket.name(), target.bucket.region(), target.prefix.as_str()),
        ("my.bucket", "eu-west-1", "a/b c/")
    );
    for (text, expected) in [
        ("s3://my.bucket/a?endpoint=http://127.0.0.1:9000", "http://127.0.0.1:9000/my.bucket/x"),
        ("s3://bucket?region=eu-west-1", "https://bucket.s3.eu-west-1.amazonaws.com/x"),
        ("s3://bucket?region=eu-west-1&style=path", "https://s3.eu-west-1.amazonaws.com/bucket/x"),
        ("s3://my.bucket?region=eu-west-1", "https://s3.eu-west-1.amazonaws.com/my.bucket/x"),
        ("s3://bucket?endpoint=https://s3.example.org&style=host", "https://bucket.s3.example.org/x"),
    ] {
        assert_eq!(s3(text).bucket.object_url("x").unwrap().as_str(), expected);
    }
    assert_eq!(s3("s3://bucket?endpoint=http://h").bucket.region(), "us-east-1");
}

#[test]
fn connections() {
    for (text, host, port) in
        [("tcp://h:9", "h", 9), ("tcp://[::1]:9/", "::1", 9), ("tcp://127.0.0.1:65535", "127.0.0.1", 65535)]
    {
        let expected = Target::Tcp(TcpTarget { address: Address { host: host.to_owned(), port } });
        assert_eq!(Target::parse(text, Origin::CommandLine), Ok(expected));
    }
}

#[test]
fn what_is_no_target_is_said_by_name() {
    let bucket = |bucket: &str| TargetError::BadBucket { bucket: bucket.to_owned() };
    for (text, expected) in [
        ("", TargetError::NoScheme),
        ("host:80", TargetError::NoScheme),
        ("http:host/", TargetError::NoScheme),
        ("://h/", TargetError::NoScheme),
        ("ftp://h/", TargetError::UnknownScheme { scheme: "ftp".to_owned() }),
        ("http://h/a b/", TargetError::BadCharacter),
        ("http://h\\x/", TargetError::BadCharacter),
        ("http://h/\n", TargetError::BadCharacter),
        ("http:///", TargetError::NoHost),
        ("http:///h/", TargetError::NoHost),
        ("http://h:99999/", TargetError::NoAddress { what: ParseError::InvalidPort }),
        ("http://u:p@h/", TargetError::HasPassword),
        ("http://h/#a/", TargetError::HasFragment),
        ("http://h", TargetError::NoSlash),
        ("http://h/a", TargetError::NoSlash),
        ("http://h/?a/", TargetError::QueryOnCommandLine),
        ("http://h/{path}?a", TargetError::QueryOnCommandLine),
        ("http://h/{path}/{path}", TargetError::BadPlaceholder),
        ("http://{path}/", TargetError::BadPlaceholder),
        ("tcp://h", TargetError::NoPort),
        ("tcp://h:0", TargetError::NoPort),
        ("tcp://h:9/a", TargetError::TcpPath),
        ("tcp://h:9?a", TargetError::TcpPath),
        ("tcp://u@h:9", TargetError::HasPassword),
        ("tcp://:9", TargetError::NoHost),
        ("s3://bucket/", TargetError::NoRegion),
        ("s3:///a", TargetError::NoHost),
        ("s3://Bucket/?region=r", bucket("Bucket")),
        ("s3://ab/?region=r", bucket("ab")),
        ("s3://a..b/?region=r", bucket("a..b")),
        ("s3://-ab/?region=r", bucket("-ab")),
        ("s3://bucket/a//b?region=r", TargetError::BadPrefix),
        ("s3://bucket/%FF?region=r", TargetError::BadPrefix),
        ("s3://bucket?region=", TargetError::BadRegion { region: String::new() }),
        ("s3://bucket?region=A", TargetError::BadRegion { region: "A".to_owned() }),
        ("s3://bucket?region=r&region=r", TargetError::UnknownOption { name: "a second region".to_owned() }),
        ("s3://bucket?region=r&secret=x", TargetError::UnknownOption { name: "secret".to_owned() }),
        ("s3://bucket?region=r&style=x", TargetError::BadStyle { style: "x".to_owned() }),
        ("s3://bucket?endpoint=h:80", TargetError::BadEndpoint),
        ("s3://bucket?endpoint=ftp://h", TargetError::BadEndpoint),
        ("s3://bucket?endpoint=http://h/x", TargetError::BadEndpoint),
        ("s3://bucket?endpoint=http://u:p@h", TargetError::BadEndpoint),
        ("s3://bucket?endpoint=http://127.0.0.1:9&style=host", TargetError::BadEndpoint),
    ] {
        assert_eq!(Target::parse(text, Origin::CommandLine), Err(expected), "{text}");
    }
    assert_eq!(Target::parse("http://h/x?sig=s", Origin::File), Err(TargetError::NoPlaceholder));
}

#[test]
fn secrets_are_not_shown() {
    for (text, shown) in [
        ("https://h/c/{path}?sig=secret", "https://h/c/{path}?…"),
        ("https://h/c?sig=secret&to={path}", "https://h/c?…"),
        ("https://h/c/{path}.new", "https://h/c/{path}.new"),
        ("https://h/c/", "https://h/c/"),
        ("tcp://h:9", "tcp://h:9"),
        ("s3://bucket/a?region=r", "s3://bucket/a/ at https://bucket.s3.r.amazonaws.com/"),
    ] {
        let target = Target::parse(text, Origin::File).unwrap();
        assert_eq!(target.shown(), shown);
        assert!(!format!("{target:?}").contains("secret"), "{text}");
    }
}

proptest! {
    #[test]
    fn any_text_is_a_target_or_refused(text in "\\PC{0,60}") {
        let _ = Target::parse(&text, Origin::File);
    }

    #[test]
    fn no_name_leads_out_of_the_target(
        shape in prop::sample::select(vec!["http://h:81/base/", "https://h/base/{path}?sig=a", "https://h/base/{path}/x"]),
        segments in prop::collection::vec("\\PC{0,12}", 1..5),
    ) {
        let Ok(name) = ObjectName::new(segments.iter().map(String::as_bytes)) else { return Ok(()) };
        let Ok(Target::Put(target)) = Target::parse(shape, Origin::File) else { panic!("{shape}") };
        let url = target.url(&name).unwrap();
        prop_assert_eq!(url.host_str(), Some("h"));
        prop_assert!(url.path().starts_with("/base/") && url.fragment().is_none(), "{}", url);
        prop_assert_eq!(url.query(), shape.split_once('?').map(|(_, query)| query));
        let inside = url.path().strip_prefix("/base/").unwrap();
        prop_assert!(inside.starts_with(&name.encoded()), "{} of {}", inside, name.encoded());
    }

    #[test]
    fn nearly_targets_do_no_harm(
        scheme in prop::sample::select(vec!["http", "https", "s3", "tcp"]),
        rest in "[a-z0-9:/?#@&=%.{}\\[\\]-]{0,40}",
    ) {
        let text = format!("{scheme}://{rest}");
        if let Ok(Target::Put(put)) = Target::parse(&text, Origin::CommandLine) {
            prop_assert!(put.url(&name()).is_ok(), "{}", text);
        }
    }
}
