//! Descriptors that a command line names. Only who starts QEMU has them, so such a QEMU cannot be started again.

use serde_json::Value;

use super::words::{Opt, Props, scan};

/// Paths and addresses that stand for a descriptor.
const PATHS: [&str; 6] =
    ["/dev/fd/", "/dev/fdset/", "/proc/self/fd/", "/proc/thread-self/fd/", "/dev/stdin", "/dev/stdout"];
/// Values of these are text of the user's.
const TEXT: [&str; 2] = ["append", "name"];
/// Values of properties whose names only look like a descriptor's, such as `ioeventfd=on`.
const SWITCHES: [&str; 6] = ["on", "off", "auto", "true", "false", ""];

/// What of `words` (without the program's name) names a descriptor, as the command line has it.
pub fn inherited(words: &[String]) -> Vec<String> {
    let Ok(options) = scan(words) else { return Vec::new() };
    let mut found: Vec<String> =
        options.iter().filter(|option| !TEXT.contains(&option.name)).flat_map(of_option).collect();
    let is_of_option = |at: &usize| options.iter().any(|option| option.at == *at);
    // The rest are images, and the options themselves.
    let images = words.iter().enumerate().filter(|(at, _)| !is_of_option(at)).map(|(_, word)| word);
    found.extend(images.filter(|word| is_descriptor_path(word)).cloned());
    found
}

fn of_option(option: &Opt<'_>) -> Vec<String> {
    let mut found = Vec::new();
    match Props::parse(option.name, option.value, "") {
        Ok(Props::Keyval(props)) => props.iter().for_each(|(key, value)| look(key, value, &mut found)),
        Ok(Props::Json(map)) => map.iter().for_each(|(key, value)| look_in(key, value, &mut found)),
        Err(_) => {}
    }
    // Also what is no list of properties, such as a URI.
    if found.is_empty() && is_descriptor_path(option.value) {
        found.push(option.value.to_owned());
    }
    found.iter().map(|what| format!("-{} {what}", option.name)).collect()
}

fn look(key: &str, value: &str, found: &mut Vec<String>) {
    let last = key.rsplit('.').next().unwrap_or(key);
    let is_number_of_one = (last.ends_with("fd") || last.ends_with("fds")) && !SWITCHES.contains(&value);
    let is_address = last == "type" && value == "fd";
    if is_number_of_one || is_address || is_descriptor_path(value) {
        found.push(if key.is_empty() { value.to_owned() } else { format!("{key}={value}") });
    }
}

fn look_in(key: &str, value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| look_in(key, value, found)),
        Value::Array(values) => values.iter().for_each(|value| look_in(key, value, found)),
        Value::String(text) => look(key, text, found),
        Value::Number(number) => look(key, &number.to_string(), found),
        Value::Bool(_) | Value::Null => {}
    }
}

fn is_descriptor_path(value: &str) -> bool {
    value.starts_with("fd:") || PATHS.iter().any(|path| value.contains(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_found_in_both_notations() {
        let check = |line: &str, expected: &[&str]| {
            let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            assert_eq!(inherited(&words), expected, "{line}");
        };
        check("-netdev tap,id=n,fd=9,vhost=on,vhostfd=10", &["-netdev fd=9", "-netdev vhostfd=10"]);
        check("-netdev tap,id=n,fds=9:10,queues=2", &["-netdev fds=9:10"]);
        check("-chardev socket,id=m,fd=mon,server=on", &["-chardev fd=mon"]);
        check("-add-fd fd=3,set=2 -drive file=/dev/fdset/2,format=raw", &["-add-fd fd=3", "-drive file=/dev/fdset/2"]);
        check("-blockdev driver=file,filename=/dev/fd/5,node-name=d", &["-blockdev filename=/dev/fd/5"]);
        check("-hda /proc/self/fd/7", &["-hda /proc/self/fd/7"]);
        check("-incoming fd:3", &["-incoming fd:3"]);
        check("-m 1G /dev/fd/4", &["/dev/fd/4"]);
        check("-fsdev proxy,id=f,sock_fd=4", &["-fsdev sock_fd=4"]);
        check("-netdev stream,id=n,addr.type=fd,addr.str=5", &["-netdev addr.type=fd"]);
        check(r#"-netdev {"type":"tap","id":"n","vhostfd":"7"}"#, &["-netdev vhostfd=7"]);
        check(r#"-netdev {"type":"stream","id":"n","addr":{"type":"fd","str":"5"}}"#, &["-netdev type=fd"]);
        check(r#"-object {"qom-type":"iommufd","id":"i","fd":3}"#, &["-object fd=3"]);
    }

    #[test]
    fn what_only_looks_like_one_is_not() {
        let line = "-m 1G -device virtio-blk-pci,ioeventfd=on,drive=d -append fd=9 -name fd=1 disk.img -incoming defer \
                    -object memory-backend-memfd,id=r,size=1G -chardev socket,id=m,path=/run/m,server=on";
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        assert_eq!(inherited(&words), [""; 0]);
        let json = r#"{"driver":"virtio-blk-pci","ioeventfd":true,"drive":"d"}"#;
        assert_eq!(inherited(&["-device".into(), json.into()]), [""; 0]);
    }
}
