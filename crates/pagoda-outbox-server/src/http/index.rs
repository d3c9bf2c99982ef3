//! Lists of directories, and figures.

use axum::Json;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use pagoda_outbox::{Ino, Kind, State};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use serde_json::{Value, json};

use super::site::{Site, not_found, unanswered};
use crate::link::answer::{Entry, Found};
use crate::link::client::Files;

/// Of names in links.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

fn state(file: &Found) -> &'static str {
    match (file.kind, file.state) {
        (Kind::Directory, _) => "directory",
        (_, State::Sealed) => "sealed",
        (_, State::Broken) => "broken",
        _ if !file.is_published => "unpublished",
        _ if file.is_complete => "closed",
        _ => "growing",
    }
}

/// Names by the order in which files were made. JSON for who asks for it, else a page of links.
pub fn listing(site: &Site, path: &[Vec<u8>], directory: Ino, headers: &HeaderMap) -> Response {
    let entries = match site.files.list(directory) {
        Ok(Some(entries)) => entries,
        Ok(None) => return not_found(),
        Err(_) => return unanswered(),
    };
    let accepts = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if accepts.contains("application/json") {
        let entry = |Entry { name, found: file }: &Entry| {
            json!({
                "name": String::from_utf8_lossy(name),
                "state": state(file),
                "size": file.size,
                "sent": file.cursor,
                "freed": file.freed.min(file.size),
            })
        };
        return Json(Value::Array(entries.iter().map(entry).collect())).into_response();
    }
    let mut base = format!("/{}/", percent_encode(site.name.as_bytes(), ENCODED));
    for name in path {
        base += &format!("{}/", percent_encode(name, ENCODED));
    }
    let mut page = String::from("<!DOCTYPE html><meta charset=utf-8><title>outbox</title><pre>\n");
    for Entry { name, found: file } in &entries {
        let link = percent_encode(name, ENCODED);
        let slash = if file.kind == Kind::Directory { "/" } else { "" };
        let (state, size) = (state(file), file.size);
        page += &format!("<a href=\"{base}{link}{slash}\">{}{slash}</a> {size} {state}\n", escaped(name));
    }
    ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], page + "</pre>\n").into_response()
}

/// A guest's name in a page: nothing of it is markup.
fn escaped(name: &[u8]) -> String {
    let mut text = String::new();
    for character in String::from_utf8_lossy(name).chars() {
        match character {
            '<' | '>' | '&' | '"' | '\'' => text += &format!("&#{};", u32::from(character)),
            _ if character.is_control() => text.push('\u{fffd}'),
            _ => text.push(character),
        }
    }
    text
}

pub fn status(files: &Files) -> Response {
    let Ok(figures) = files.figures() else { return unanswered() };
    Json(json!({
        "space_bytes": figures.budget,
        "used_bytes": figures.used,
        "delivered_bytes_kept": figures.disposable,
        "available_bytes": figures.available(),
        "files": figures.nodes.saturating_sub(1),
        "readers": figures.readers,
        "written_bytes": figures.bytes_written,
        "acknowledged_bytes": figures.bytes_acknowledged,
        "refused_changes": figures.refused_changes,
        "expired_files": figures.expired,
        "expired_undelivered_files": figures.expired_undelivered,
    }))
    .into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_no_markup() {
        assert_eq!(escaped(b"<a href=\"x\">&'"), "&#60;a href=&#34;x&#34;&#62;&#38;&#39;");
        assert_eq!(escaped(b"a\nb\xff"), "a\u{fffd}b\u{fffd}");
        assert_eq!(escaped("größe 1".as_bytes()), "größe 1");
    }
}
