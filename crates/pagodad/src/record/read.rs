//! Reading a record, whatever wrote it.

use pagoda_image::checked_text::unseal;

use super::{BadRecord, FIRST_LINE, RECORD_MAX, Record, bad, format_1};

impl Record {
    /// Reads a record of any format that is known.
    ///
    /// # Errors
    /// It is damaged, of another version, or has what this version does not know.
    pub fn from_text(text: &str) -> Result<Record, BadRecord> {
        if text.len() > RECORD_MAX {
            return Err(bad("longer than a record can be"));
        }
        let record = match unseal(text).map_err(bad)? {
            (FIRST_LINE, json) => Record::from_json(json)?,
            (format_1::FIRST_LINE, lines) => format_1::read(lines, text.len())?,
            _ => return Err(bad("written by another version")),
        };
        record.check()?;
        Ok(record)
    }
}
