//! Files with secrets: only their owner may read them, and nothing of them gets into a message.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use hyper::header::{HeaderName, HeaderValue};

/// The largest file of this kind.
const FILE_BYTES_MAX: u64 = 64 << 10;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    #[error("{path} cannot be read: {what}")]
    Unreadable { path: String, what: String },
    #[error("{path} can be read by others (mode {mode:03o}): run chmod 600 {path}, and think of it as known")]
    ReadableByOthers { path: String, mode: u32 },
    #[error("{path} has more than {FILE_BYTES_MAX} bytes, or is not text")]
    NotText { path: String },
    #[error("line {line}: say NAME: VALUE, as a header of HTTP")]
    BadHeader { line: usize },
    #[error("line {line}: the header {name} is set by the transmitter: leave it out")]
    OwnHeader { line: usize, name: String },
    #[error("line {line}: say NAME = VALUE, as in a credentials file of AWS")]
    BadSetting { line: usize },
    #[error("line {line}: there are keys of several profiles: keep those of one")]
    SeveralProfiles { line: usize },
    #[error("there is no {name}: put a line {name} = … into the file")]
    MissingKey { name: &'static str },
}

/// The text of a file that nobody but its owner may read.
///
/// # Errors
/// Others may read it, or it cannot be read.
pub fn read_secret(path: &Path) -> Result<String, SecretError> {
    let shown = path.display().to_string();
    let unreadable = |error: std::io::Error| SecretError::Unreadable { path: shown.clone(), what: error.to_string() };
    let file = File::open(path).map_err(unreadable)?;
    // Of the open file: the name may lead elsewhere a moment later.
    let mode = file.metadata().map_err(unreadable)?.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(SecretError::ReadableByOthers { path: shown, mode });
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    let text = String::from_utf8(bytes).ok().filter(|text| text.len() as u64 <= FILE_BYTES_MAX);
    text.ok_or(SecretError::NotText { path: shown })
}

/// Lines that say something, with their numbers.
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = (1..).zip(text.lines().map(str::trim));
    lines.filter(|(_, line)| !line.is_empty() && !line.starts_with(['#', ';']))
}

/// A header of each PUT, such as `Authorization: Bearer …`.
#[derive(Clone, PartialEq, Eq)]
pub struct Header {
    pub(crate) name: HeaderName,
    pub(crate) value: HeaderValue,
}

impl Header {
    /// The headers that a file of lines `NAME: VALUE` has.
    ///
    /// # Errors
    /// A line is none, or is about what the transmitter has to say itself.
    pub fn parse(text: &str) -> Result<Vec<Header>, SecretError> {
        lines(text).map(|(line, said)| Header::parse_line(line, said)).collect()
    }

    fn parse_line(line: usize, said: &str) -> Result<Header, SecretError> {
        const OWN: [&str; 6] = ["host", "content-length", "transfer-encoding", "connection", "expect", "upgrade"];
        let bad = SecretError::BadHeader { line };
        let (name, value) = said.split_once(':').ok_or(bad.clone())?;
        let name = HeaderName::from_bytes(name.trim().as_bytes()).map_err(|_| bad.clone())?;
        if OWN.contains(&name.as_str()) {
            return Err(SecretError::OwnHeader { line, name: name.to_string() });
        }
        let mut value = HeaderValue::from_str(value.trim()).map_err(|_| bad)?;
        value.set_sensitive(true);
        Ok(Header { name, value })
    }
}

impl fmt::Debug for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: …", self.name)
    }
}

/// By what S3 knows who sends.
#[derive(Clone, PartialEq, Eq)]
pub struct S3Keys {
    pub(crate) id: String,
    pub(crate) secret: String,
    pub(crate) token: Option<String>,
}

impl S3Keys {
    /// The keys of a credentials file of AWS, which has one profile.
    ///
    /// # Errors
    /// A key is missing, or a line is no setting.
    pub fn parse(text: &str) -> Result<S3Keys, SecretError> {
        const ID: &str = "aws_access_key_id";
        const SECRET: &str = "aws_secret_access_key";
        const TOKEN: &str = "aws_session_token";
        let (mut id, mut secret, mut token) = (None, None, None);
        for (line, said) in lines(text) {
            if said.starts_with('[') && said.ends_with(']') {
                continue;
            }
            let (name, value) = said.split_once('=').ok_or(SecretError::BadSetting { line })?;
            let place = match name.trim() {
                ID => &mut id,
                SECRET => &mut secret,
                TOKEN => &mut token,
                // Settings of AWS's own programs, such as the region.
                _ => continue,
            };
            let value = value.trim();
            if value.is_empty() || value.contains(|c: char| !c.is_ascii_graphic()) {
                return Err(SecretError::BadSetting { line });
            }
            if place.replace(value.to_owned()).is_some() {
                return Err(SecretError::SeveralProfiles { line });
            }
        }
        let missing = |name| SecretError::MissingKey { name };
        Ok(S3Keys { id: id.ok_or(missing(ID))?, secret: secret.ok_or(missing(SECRET))?, token })
    }
}

impl fmt::Debug for S3Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("keys of S3")
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_that_others_may_read_is_refused() {
        let path = std::env::temp_dir().join(format!("pagoda-push-secret-{}", std::process::id()));
        std::fs::write(&path, "a\n").unwrap();
        let allow = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        allow(0o640);
        let shown = path.display().to_string();
        assert_eq!(read_secret(&path), Err(SecretError::ReadableByOthers { path: shown.clone(), mode: 0o640 }));
        allow(0o600);
        assert_eq!(read_secret(&path).unwrap(), "a\n");
        std::fs::write(&path, b"\xff").unwrap();
        assert_eq!(read_secret(&path), Err(SecretError::NotText { path: shown.clone() }));
        std::fs::write(&path, vec![b'a'; 64 << 10]).unwrap();
        assert_eq!(read_secret(&path).unwrap().len(), 64 << 10);
        std::fs::write(&path, vec![b'a'; (64 << 10) + 1]).unwrap();
        assert_eq!(read_secret(&path), Err(SecretError::NotText { path: shown }));
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(read_secret(&path), Err(SecretError::Unreadable { .. })));
    }

    #[test]
    fn headers() {
        let found = Header::parse("# token\nAuthorization: Bearer a:b\n\nX-Ms-Blob-Type: BlockBlob\n").unwrap();
        let pairs: Vec<_> = found.iter().map(|header| (header.name.as_str(), header.value.to_str().unwrap())).collect();
        assert_eq!(pairs, [("authorization", "Bearer a:b"), ("x-ms-blob-type", "BlockBlob")]);
        assert_eq!(format!("{:?}", found[0]), "authorization: …");
        assert_eq!(Header::parse("a: b\nBearer"), Err(SecretError::BadHeader { line: 2 }));
        assert_eq!(Header::parse("a b: c"), Err(SecretError::BadHeader { line: 1 }));
        let own = SecretError::OwnHeader { line: 1, name: "content-length".to_owned() };
        assert_eq!(Header::parse("Content-Length: 3"), Err(own));
    }

    #[test]
    fn keys() {
        let text = "[default]\naws_access_key_id = AK\naws_secret_access_key=s/+=\nregion = x\n";
        let keys = S3Keys::parse(text).unwrap();
        assert_eq!((keys.id.as_str(), keys.secret.as_str(), &keys.token), ("AK", "s/+=", &None));
        assert_eq!(format!("{keys:?}"), "keys of S3");
        let with_token = S3Keys::parse(&format!("{text}aws_session_token = t\n")).unwrap();
        assert_eq!(with_token.token.as_deref(), Some("t"));
        let missing = SecretError::MissingKey { name: "aws_secret_access_key" };
        assert_eq!(S3Keys::parse("aws_access_key_id = AK"), Err(missing));
        assert_eq!(S3Keys::parse(&format!("{text}{text}")), Err(SecretError::SeveralProfiles { line: 6 }));
        assert_eq!(S3Keys::parse("nothing"), Err(SecretError::BadSetting { line: 1 }));
        assert_eq!(S3Keys::parse("aws_access_key_id ="), Err(SecretError::BadSetting { line: 1 }));
    }
}
