//! Targets to which files go by PUT: a base, or a template.

use url::{Position, Url};

use super::{Origin, TargetError, address};
use crate::name::ObjectName;

/// Where the file's path belongs in a template.
const PLACEHOLDER: &str = "{path}";
/// Stands for it while the address is read, as `{` may not stand in one.
const MARKER: &str = "pagoda--path--here";

/// An address to which files are put, less their paths.
#[derive(Clone, PartialEq, Eq)]
pub struct PutTarget {
    /// Up to the file's path.
    before: String,
    /// What stands behind the path.
    behind: String,
}

impl PutTarget {
    pub(super) fn parse(text: &str, origin: Origin) -> Result<PutTarget, TargetError> {
        match text.matches(PLACEHOLDER).count() {
            0 => PutTarget::parse_base(text, origin),
            1 => PutTarget::parse_template(text, origin),
            _ => Err(TargetError::BadPlaceholder),
        }
    }

    fn parse_base(text: &str, origin: Origin) -> Result<PutTarget, TargetError> {
        let url = address(text)?;
        match (url.query(), origin) {
            (Some(_), Origin::CommandLine) => return Err(TargetError::QueryOnCommandLine),
            (Some(_), Origin::File) => return Err(TargetError::NoPlaceholder),
            (None, _) => {}
        }
        // Of the text: "http://host" alone would be given a slash.
        if !text.ends_with('/') {
            return Err(TargetError::NoSlash);
        }
        Ok(PutTarget { before: url.into(), behind: String::new() })
    }

    fn parse_template(text: &str, origin: Origin) -> Result<PutTarget, TargetError> {
        let url = address(&text.replace(PLACEHOLDER, MARKER))?;
        if url.query().is_some() && origin == Origin::CommandLine {
            return Err(TargetError::QueryOnCommandLine);
        }
        let start = url[..Position::AfterPort].len();
        let (before, behind) = url.as_str().split_once(MARKER).ok_or(TargetError::BadPlaceholder)?;
        if before.len() < start || behind.contains(MARKER) {
            return Err(TargetError::BadPlaceholder);
        }
        Ok(PutTarget { before: before.to_owned(), behind: behind.to_owned() })
    }

    /// Where `name` is put.
    pub(crate) fn url(&self, name: &ObjectName) -> Result<Url, TargetError> {
        let text = format!("{}{}{}", self.before, name.encoded(), self.behind);
        Url::parse(&text).map_err(|what| TargetError::NoAddress { what })
    }

    pub(super) fn shown(&self) -> String {
        let visible = |text: &str| text.split_once('?').map_or(text.to_owned(), |(path, _)| format!("{path}?…"));
        match (self.before.contains('?'), self.behind.is_empty()) {
            (false, true) => self.before.clone(),
            (false, false) => format!("{}{PLACEHOLDER}{}", self.before, visible(&self.behind)),
            (true, _) => visible(&self.before),
        }
    }
}

/// A query may be a signature.
impl std::fmt::Debug for PutTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.shown())
    }
}
