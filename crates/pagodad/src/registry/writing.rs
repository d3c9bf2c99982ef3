//! The lock under which the record of one VM is written.

use std::sync::{Arc, Mutex};

/// The right to write or remove one VM's record.
pub type WritingLock = Arc<Mutex<()>>;
