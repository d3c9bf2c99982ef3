//! What a VM's command line says of its disks, beyond what QEMU tells.
//!
//! Words are read as QEMU reads options: `name=value` behind commas, where two commas are one of a value, or JSON, with either
//! kind of quotation marks. Options are looked for in all words, also where they mean something else: what is refused too often is
//! no harm.

use std::path::{Path, PathBuf};

use pagoda_api::types::Launch;

use super::stat::Stat;
use crate::record::FileId;

/// An option of a word. In a node below another one the name is as in `file.aio`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Setting {
    /// Empty if the word has a value alone.
    name: String,
    value: String,
}

impl Setting {
    fn has_part(&self, name: &str) -> bool {
        self.name.split('.').any(|part| part == name)
    }

    fn is(&self, name: &str) -> bool {
        self.name.rsplit('.').next() == Some(name)
    }
}

/// The options of a word.
fn settings(word: &str) -> Vec<Setting> {
    if let Some(json) = json_of(word) {
        return json_settings(json);
    }
    let mut settings = Vec::new();
    // QEMU reads from the left: of three commas the third one ends the value.
    for part in word.replace(",,", COMMA).split(',') {
        let part = part.replace(COMMA, ",");
        let (name, value) = part.split_once('=').unwrap_or(("", &part));
        if let Some(json) = json_of(value) {
            settings.extend(json_settings(json));
        }
        settings.push(Setting { name: name.to_owned(), value: value.to_owned() });
    }
    settings
}

/// Stands for a comma of a value. No path and no word of a command line has it.
const COMMA: &str = "\0";

fn json_of(text: &str) -> Option<&str> {
    text.strip_prefix("json:").or(Some(text)).filter(|json| json.trim_start().starts_with('{'))
}

/// The members of all objects of a text that QEMU takes for JSON. One that is an object or a list has an empty value.
fn json_settings(json: &str) -> Vec<Setting> {
    let tokens = tokens(json);
    let mut settings = Vec::new();
    for (index, token) in tokens.iter().enumerate() {
        match (token, tokens.get(index + 1), tokens.get(index + 2)) {
            (Token::Text(name), Some(Token::Mark(':')), value) => {
                let value = match value {
                    Some(Token::Text(value)) => value.clone(),
                    _ => String::new(),
                };
                settings.push(Setting { name: name.clone(), value });
            }
            // In a list, or the value of what was just found.
            (Token::Text(value), ..) => settings.push(Setting { name: String::new(), value: value.clone() }),
            (Token::Mark(_), ..) => {}
        }
    }
    settings
}

#[derive(Debug)]
enum Token {
    /// In quotation marks, or a number, `true`, `null`.
    Text(String),
    Mark(char),
}

fn tokens(json: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    let mut rest = json.trim_start();
    while let Some(first) = rest.chars().next() {
        let (token, len) = match first {
            '"' | '\'' => quoted(rest, first),
            '{' | '}' | '[' | ']' | ':' | ',' => (Token::Mark(first), 1),
            _ => {
                let len = rest.find(|c: char| "{}[]:,\"'".contains(c) || c.is_whitespace()).unwrap_or(rest.len());
                (Token::Text(rest[..len].to_owned()), len)
            }
        };
        tokens.push(token);
        rest = rest[len..].trim_start();
    }
    tokens
}

/// A text in quotation marks, and its length with them. One without an end is taken to the end.
fn quoted(text: &str, mark: char) -> (Token, usize) {
    let mut escaped = false;
    let end = text.char_indices().skip(1).find(|(_, c)| {
        let is_end = *c == mark && !escaped;
        escaped = *c == '\\' && !escaped;
        is_end
    });
    let len = end.map_or(text.len(), |(at, _)| at + 1);
    let inner = text[1..len].strip_suffix(mark).unwrap_or(&text[1..len]);
    // JSON knows one kind of marks.
    let inner = if mark == '\'' { inner.replace("\\'", "'").replace('"', "\\\"") } else { inner.to_owned() };
    let read = serde_json::from_str(&format!("\"{inner}\""));
    (Token::Text(read.unwrap_or(inner)), len)
}

/// An option that makes a disk one that a snapshot cannot have, and why.
pub fn refusal(launch: &Launch) -> Option<String> {
    let settings: Vec<Setting> = launch.words.iter().flat_map(|word| settings(word)).collect();
    if settings.iter().any(|of| of.has_part("backing")) {
        return Some(
            "its command line says which files are behind a disk, and QEMU would not look at the disk itself for that"
                .to_owned(),
        );
    }
    let is_shared = |of: &Setting| {
        let is_on = of.is("share-rw") && !["off", "false", "no"].contains(&of.value.as_str());
        // A name without a value stands for `on`.
        is_on || of.name.is_empty() && of.value == "share-rw"
    };
    settings.iter().any(is_shared).then(|| "its command line lets others write to a disk (share-rw)".to_owned())
}

/// How QEMU is told to reach the file of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ways {
    /// `threads`, `native` or `io_uring`; QEMU's default if nothing is said.
    pub aio: Option<String>,
    /// `unmap`, if QEMU is told to pass the guest's discards on.
    pub discard: Option<String>,
}

/// What the word says that names this file.
pub fn ways(launch: &Launch, file: FileId) -> Ways {
    let Some(word) = launch.words.iter().find(|word| names(word, &launch.cwd, &|id| id == file)) else {
        return Ways::default();
    };
    let settings = settings(word);
    let value = |name: &str| settings.iter().find(|of| of.is(name)).map(|of| of.value.as_str());
    let aio = value("aio").filter(|aio| ["threads", "native", "io_uring"].contains(aio)).map(str::to_owned);
    let discard = value("discard").filter(|discard| ["unmap", "on"].contains(discard)).map(|_| "unmap".to_owned());
    Ways { aio, discard }
}

/// Whether a command line names one of these files.
pub fn name_any(launch: &Launch, is_it: &dyn Fn(FileId) -> bool) -> bool {
    launch.words.iter().any(|word| names(word, &launch.cwd, is_it))
}

/// All that may be a path.
fn paths(word: &str, cwd: &str) -> impl Iterator<Item = PathBuf> {
    // Behind `-hda` the word is a path as it is.
    let values = std::iter::once(word.to_owned()).chain(settings(word).into_iter().map(|of| of.value));
    values
        .filter(|path| !path.is_empty())
        .map(move |path| Path::new(cwd).join(path.strip_prefix("file:").unwrap_or(&path)))
}

/// `cwd` is where relative paths begin.
fn names(word: &str, cwd: &str, is_it: &dyn Fn(FileId) -> bool) -> bool {
    let id = |path: PathBuf| Stat::of_path(&path).ok().filter(|stat| stat.is_file).map(|stat| stat.id);
    paths(word, cwd).filter_map(id).any(is_it)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(words: &[&str], cwd: &str) -> Launch {
        Launch {
            words: words.iter().map(|word| (*word).to_owned()).collect(),
            cwd: cwd.to_owned(),
            ..Launch::default()
        }
    }

    #[test]
    fn options_of_a_disk_are_found() {
        let dir = std::env::temp_dir().join(format!("pagodad-words-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let odd = "d=e,f\"g'.qcow2";
        for name in ["a.qcow2", "b,c.qcow2", "b,,c.qcow2", odd] {
            std::fs::write(dir.join(name), "").unwrap();
        }
        let cwd = dir.to_str().unwrap();
        let id = |name: &str| Stat::of_path(&dir.join(name)).unwrap().id;
        let check = |word: &str, file: &str, expected: (Option<&str>, Option<&str>)| {
            let found = ways(&launch(&["-m", "1G", word], cwd), id(file));
            assert_eq!((found.aio.as_deref(), found.discard.as_deref()), expected, "{word}");
        };
        check("file=a.qcow2,if=virtio,cache=none,aio=native", "a.qcow2", (Some("native"), None));
        check("file=a.qcow2,discard=unmap,file.aio=io_uring", "a.qcow2", (Some("io_uring"), Some("unmap")));
        check("file=b,,c.qcow2,aio=native", "b,c.qcow2", (Some("native"), None));
        check("file=b,,,,c.qcow2,aio=native", "b,,c.qcow2", (Some("native"), None));
        check("file=b,,c.qcow2,aio=native", "a.qcow2", (None, None));
        let json = r#"{"driver": "file", "filename": "a.qcow2", "aio": "native", "node-name": "n"}"#;
        check(json, "a.qcow2", (Some("native"), None));
        check(&format!("file={cwd}/a.qcow2,aio=weird,discard=on"), "a.qcow2", (None, Some("unmap")));
        check("if=virtio,file.filename=d=e,,f\"g'.qcow2,aio=native", odd, (Some("native"), None));
        check(r#"{"file": {"filename": "d=e,f\"g'.qcow2", "aio": "native"}}"#, odd, (Some("native"), None));
        check(r#"{'file': {'filename': 'd=e,f"g\'.qcow2', 'aio': 'native'}}"#, odd, (Some("native"), None));
        check(r#"if=none,file=json:{"filename":"d\u003de,,f\"g'.qcow2",,"aio":"native"}"#, odd, (Some("native"), None));
        for (word, file) in
            [("a.qcow2", "a.qcow2"), (odd, odd), ("b,,c.qcow2", "b,,c.qcow2"), ("file:a.qcow2", "a.qcow2")]
        {
            assert!(name_any(&launch(&["-hda", word], cwd), &|found| found == id(file)), "{word}");
        }
        assert!(!name_any(&launch(&["-hda", "a.qcow2"], cwd), &|found| found == id("b,c.qcow2")));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn files_behind_a_disk_and_shared_disks_are_refused() {
        let check =
            |word: &str, is_refused: bool| assert_eq!(refusal(&launch(&[word], "/")).is_some(), is_refused, "{word}");
        check("driver=qcow2,file=f,backing=b", true);
        check("file=a,backing.file.filename=b", true);
        check("driver=throttle,file.driver=qcow2,file.backing.driver=null-co", true);
        check(r#"{"driver":"qcow2","file":"f","backing":null}"#, true);
        check("{'driver': 'qcow2', 'file': 'f', 'backing': {'driver': 'null-co'}}", true);
        check("file=/backing/a.qcow2,if=virtio", false);
        check("file=/a,,backing=b.qcow2,if=virtio", false);
        check("virtio-blk-pci,drive=d,share-rw=on", true);
        check("virtio-blk-pci,drive=d,share-rw", true);
        check("virtio-blk-pci,drive=d,share-rw=off", false);
        check("file=share-rw=off,share-rw=on", true);
        check(r#"{"driver": "virtio-blk-pci", "drive": "d", "share-rw": true}"#, true);
    }

    /// What is no JSON, or is cut, is read as far as it goes.
    #[test]
    fn any_word_can_be_read() {
        for word in
            ["", ",", ",,,", "=", "{", "{\"", "{'a", "json:{", "{\"a\":", "{\"a\\", "{a:b}", "x={'\\'", "\0,ä=ö"]
        {
            settings(word);
        }
        assert_eq!(settings("a=b=c,,d,e")[0], Setting { name: "a".into(), value: "b=c,d".into() });
    }
}
