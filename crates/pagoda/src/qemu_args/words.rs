//! QEMU's command line as words: which are options, which belong to an option, and the two
//! notations of an option's value (`key=value,...` and JSON).

use super::error::ArgError;

/// Options that take no argument: those of `qemu-options.hx` (QEMU 5 to 10) without `HAS_ARG`.
/// All others take the next word. An option missing here would hide the next one from us, so
/// the list also has options that only some targets and old versions know.
const WITHOUT_ARGUMENT: &[&str] = &[
    "S",
    "alt-grab",
    "async-teardown",
    "audio-help",
    "ctrl-grab",
    "curses",
    "daemonize",
    "enable-fips",
    "enable-hax",
    "enable-kvm",
    "enable-sync-profile",
    "full-screen",
    "h",
    "help",
    "jitdump",
    "mem-prealloc",
    "no-acpi",
    "no-fd-bootchk",
    "no-frame",
    "no-hpet",
    "no-kvm",
    "no-kvm-irqchip",
    "no-kvm-pit",
    "no-kvm-pit-reinjection",
    "no-quit",
    "no-reboot",
    "no-shutdown",
    "no-user-config",
    "nodefaults",
    "nodefconfig",
    "nographic",
    "old-param",
    "one-insn-per-tb",
    "only-migratable",
    "perfmap",
    "portrait",
    "preconfig",
    "rtc-td-hack",
    "s",
    "sdl",
    "semihosting",
    "show-cursor",
    "singlestep",
    "snapshot",
    "tdf",
    "usb",
    "version",
    "win2k-hack",
    "xen-attach",
    "xen-domid-restrict",
];

/// One option as it stands on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opt<'a> {
    /// The option's name, without its dashes.
    pub name: &'a str,
    /// The option's value; empty if it takes none.
    pub value: &'a str,
    /// Index of `value` among the words (of the option itself if it has none).
    pub at: usize,
    /// It takes no value, whatever follows it.
    pub is_alone: bool,
}

/// Finds the options among `words`, which do not include the program's name. Other words are disk
/// images and not of interest.
pub fn scan(words: &[String]) -> Result<Vec<Opt<'_>>, ArgError> {
    let mut options = Vec::new();
    let mut at = 0;
    while let Some(word) = words.get(at) {
        // QEMU takes one dash or two.
        if let Some(name) = word.strip_prefix("--").or_else(|| word.strip_prefix('-')) {
            if WITHOUT_ARGUMENT.contains(&name) || name.is_empty() {
                options.push(Opt { name, value: "", at, is_alone: true });
            } else if let Some(value) = words.get(at + 1) {
                at += 1;
                options.push(Opt { name, value, at, is_alone: false });
            } else {
                return Err(ArgError::new(
                    format!("{word} is the last word and has no argument"),
                    "give its argument, or leave it out",
                ));
            }
        }
        at += 1;
    }
    Ok(options)
}

/// The properties of one option, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum Props {
    /// `key=value,...`; a comma within a value is doubled.
    Keyval(Vec<(String, String)>),
    Json(serde_json::Map<String, serde_json::Value>),
}

impl Props {
    /// Reads an option's value. `implied` is the key of a first property that is only a value;
    /// a later one means `on`.
    pub fn parse(option: &str, value: &str, implied: &str) -> Result<Self, ArgError> {
        if value.trim_start().starts_with('{') {
            return match serde_json::from_str(value) {
                Ok(serde_json::Value::Object(map)) => Ok(Self::Json(map)),
                _ => Err(ArgError::new(
                    format!("-{option} {value} is not valid JSON"),
                    "write it as QEMU's manual shows",
                )),
            };
        }
        let mut props = Vec::new();
        for (index, part) in split_commas(value).into_iter().enumerate() {
            props.push(match part.split_once('=') {
                Some((key, value)) => (key.to_owned(), value.to_owned()),
                None if index == 0 && !implied.is_empty() => (implied.to_owned(), part),
                None => (part, "on".to_owned()),
            });
        }
        Ok(Self::Keyval(props))
    }

    /// The value of `key` as text; the last one counts, as in QEMU. JSON's `true` is `on`.
    pub fn get(&self, key: &str) -> Option<String> {
        match self {
            Self::Keyval(props) => props.iter().rev().find(|(k, _)| k == key).map(|(_, value)| value.clone()),
            Self::Json(map) => map.get(key).map(|value| match value {
                serde_json::Value::String(text) => text.clone(),
                serde_json::Value::Bool(true) => "on".into(),
                serde_json::Value::Bool(false) => "off".into(),
                other => other.to_string(),
            }),
        }
    }

    pub fn keys(&self) -> Vec<&str> {
        match self {
            Self::Keyval(props) => props.iter().map(|(key, _)| key.as_str()).collect(),
            Self::Json(map) => map.keys().map(String::as_str).collect(),
        }
    }

    /// Keeps the properties whose keys `keep` accepts.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        match self {
            Self::Keyval(props) => props.retain(|(key, _)| keep(key)),
            Self::Json(map) => map.retain(|key, _| keep(key)),
        }
    }

    /// Sets `key`, in its place if it is there already. It is there once then: of several the last one would count.
    pub fn set_text(&mut self, key: &str, value: &str) {
        match self {
            Self::Keyval(props) => {
                let place = props.iter().position(|(k, _)| k == key).unwrap_or(props.len());
                props.retain(|(k, _)| k != key);
                props.insert(place, (key.into(), value.into()));
            }
            Self::Json(map) => drop(map.insert(key.into(), value.into())),
        }
    }

    pub fn set_bool(&mut self, key: &str, value: bool) {
        match self {
            Self::Keyval(_) => self.set_text(key, if value { "on" } else { "off" }),
            Self::Json(map) => drop(map.insert(key.into(), value.into())),
        }
    }

    pub fn set_bytes(&mut self, key: &str, bytes: u64) {
        match self {
            Self::Keyval(_) => self.set_text(key, &bytes.to_string()),
            Self::Json(map) => drop(map.insert(key.into(), bytes.into())),
        }
    }

    /// The option's value again.
    pub fn render(&self) -> String {
        match self {
            Self::Keyval(props) => {
                let parts = props.iter().map(|(key, value)| format!("{key}={}", escape(value)));
                parts.collect::<Vec<_>>().join(",")
            }
            Self::Json(map) => serde_json::Value::Object(map.clone()).to_string(),
        }
    }
}

/// A boolean as QEMU reads it.
pub fn is_on(value: &str) -> bool {
    matches!(value, "on" | "yes" | "true" | "y")
}

/// A value for a `key=value` list.
pub fn escape(value: &str) -> String {
    value.replace(',', ",,")
}

/// Splits at single commas; a doubled one stands for itself.
fn split_commas(value: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut rest = value;
    while let Some((head, tail)) = rest.split_once(',') {
        let last = parts.len() - 1;
        parts[last] += head;
        if let Some(tail) = tail.strip_prefix(',') {
            parts[last].push(',');
            rest = tail;
        } else {
            parts.push(String::new());
            rest = tail;
        }
    }
    let last = parts.len() - 1;
    parts[last] += rest;
    parts.retain(|part| !part.is_empty());
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn options_and_their_arguments() {
        let check = |line: &str, expected: &[(&str, &str)]| {
            let words = words(line);
            let found = scan(&words).unwrap();
            let found: Vec<_> = found.iter().map(|o| (o.name, o.value)).collect();
            assert_eq!(found, expected, "{line}");
        };
        check("-m 4G disk.img -S", &[("m", "4G"), ("S", "")]);
        check("--machine q35 -nographic -m 1G", &[("machine", "q35"), ("nographic", ""), ("m", "1G")]);
        check("-append -m -kernel k", &[("append", "-m"), ("kernel", "k")]);
        check("", &[]);
        assert!(scan(&words("-S -m")).is_err());
    }

    #[test]
    fn properties() {
        let check = |value: &str, expected: &[(&str, &str)]| {
            let Props::Keyval(props) = Props::parse("x", value, "first").unwrap() else { panic!() };
            let props: Vec<_> = props.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
            assert_eq!(props, expected, "{value}");
        };
        check("q35,accel=kvm", &[("first", "q35"), ("accel", "kvm")]);
        check("accel=kvm,q35", &[("accel", "kvm"), ("q35", "on")]);
        check("a=x,,y,b=z", &[("a", "x,y"), ("b", "z")]);
        check("a=x,,,b=z", &[("a", "x,"), ("b", "z")]);
        check("a=b=c", &[("a", "b=c")]);
        check("", &[]);
        assert!(Props::parse("object", "{bad", "").is_err());
    }

    #[test]
    fn rendering_keeps_the_notation() {
        let mut keyval = Props::parse("object", "ram,id=a,,b", "qom-type").unwrap();
        keyval.set_bool("share", true);
        assert_eq!(keyval.render(), "qom-type=ram,id=a,,b,share=on");
        let mut json = Props::parse("object", r#"{"qom-type":"ram","host-nodes":[0]}"#, "").unwrap();
        json.set_bytes("size", 7);
        json.set_bool("share", true);
        assert_eq!(json.get("share").as_deref(), Some("on"));
        assert_eq!(json.get("host-nodes").as_deref(), Some("[0]"));
        assert_eq!(json.render(), r#"{"host-nodes":[0],"qom-type":"ram","share":true,"size":7}"#);
    }
}
