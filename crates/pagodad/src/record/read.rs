//! Reading a record, whatever wrote it.

use super::{BadRecord, FIRST_LINE, RECORD_MAX, Record, bad, checksum, format_1};

impl Record {
    /// Reads a record of any format that is known.
    ///
    /// # Errors
    /// It is damaged, of another version, or has what this version does not know.
    pub fn from_text(text: &str) -> Result<Record, BadRecord> {
        if text.len() > RECORD_MAX {
            return Err(bad("longer than a record can be"));
        }
        let (body, sum) = text.trim_end().rsplit_once('\n').ok_or_else(|| bad("too short"))?;
        // What is summed ends with a line's end.
        let body = &text[..body.len() + 1];
        let sum = sum.strip_prefix("sum ").ok_or_else(|| bad("no checksum"))?;
        if sum != format!("{:016x}", checksum(body)) {
            return Err(bad("checksum does not match"));
        }
        let record = match body.split_once('\n') {
            Some((FIRST_LINE, json)) => Record::from_json(json)?,
            Some((format_1::FIRST_LINE, lines)) => format_1::read(lines, text.len())?,
            _ => return Err(bad("written by another version")),
        };
        record.check()?;
        Ok(record)
    }
}
