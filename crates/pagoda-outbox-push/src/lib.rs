//! Sends files of an outbox to a server that the user names: by PUT, to S3, or by plain TCP.
//!
//! The caller has a [`Source`] for each file: its bytes, sealed or growing. [`push`] sends it to a [`Target`], as often as needed,
//! and tells the source what the server has for good. The source keeps all memory above that. Nobody else decides what was
//! delivered.
//!
//! What always holds:
//! - A byte is acknowledged only after the server has said that it has it: by the status of a PUT, by the ETag of a part of an S3
//!   upload, or by the orderly end of a TCP connection whose file has ended.
//! - A file that is not whole never looks whole: a body without its end, an upload that is not completed, a connection that is reset.
//! - What the server says is tried again, with pauses, until the caller says stop ([`Stop`]). What the file says is final ([`Cause`]).
//! - Secrets come out of files that only their owner may read, and are in no message.
//!
//! Nothing here opens a file or looks up a name after [`Settings`] were made, but by [`Dial`], which the caller may replace.

mod address;
mod body;
mod dial;
mod failure;
mod http;
mod limit;
mod memory;
mod name;
mod parts;
mod pump;
mod put;
mod retry;
mod s3;
mod secret;
mod sender;
mod source;
mod status;
mod target;
mod tcp;

pub use self::dial::{Dial, Dialling, Direct, Trust, TrustError};
pub use self::failure::{Cause, Failure};
pub use self::limit::Limiter;
pub use self::memory::{Grower, Growing, growing};
pub use self::name::{NameError, ObjectName};
pub use self::retry::{Backoff, Pauses};
pub use self::secret::{Header, S3Keys, SecretError, read_secret};
pub use self::sender::{Outcome, Settings, Stop, push};
pub use self::source::{Next, Source};
pub use self::status::{Phase, Status};
pub use self::target::{Origin, PutTarget, S3Target, Target, TargetError, TcpTarget};
