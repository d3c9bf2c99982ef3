//! What is answered when something about a snapshot is not possible.

use std::error::Error;

use pagoda_api::in_full;
use pagoda_api::types::{ApiError, ErrorCode, SnapshotName};
use pagoda_image::{ImageId, Listed};

use super::readers::InUse;

const SEE: Option<&str> = Some("see `pagoda snapshot ls`");

/// The request is refused, and nothing was changed.
pub fn refused(why: impl Into<String>, hint: Option<&str>) -> ApiError {
    ApiError::new(ErrorCode::Refused, why, hint)
}

/// The same of a VM that is in another state than the request needs, or has the name that it needs.
pub fn as_refused(error: ApiError) -> ApiError {
    match error.code {
        ErrorCode::WrongState | ErrorCode::NameTaken => ApiError { code: ErrorCode::Refused, ..error },
        _ => error,
    }
}

pub fn failed(what: &str, cause: &(dyn Error + 'static)) -> ApiError {
    ApiError::new(ErrorCode::Internal, format!("{what}: {}", in_full(cause)), None)
}

pub fn no_such_snapshot(name: &SnapshotName) -> ApiError {
    ApiError::new(ErrorCode::NoSuchSnapshot, format!("there is no snapshot {name}"), SEE)
}

pub fn no_image(id: ImageId) -> ApiError {
    ApiError::new(ErrorCode::NoSuchSnapshot, format!("there is no image {id}"), SEE)
}

/// The answer to a removal of an image that is in use.
pub fn in_use(listed: &Listed, why: &InUse) -> ApiError {
    let name = match &listed.manifest {
        Some(manifest) => SnapshotName::new(&*manifest.vm, &*manifest.name).to_string(),
        None => format!("the image {}", listed.id),
    };
    let hint = match why {
        InUse::Read(_) => {
            "it can be removed when they have ended or have all their memory in DRAM: see `pagoda snapshot show`"
        }
        InUse::Exported => "it can be removed when that is over, or its command has ended",
        InUse::Unknown(_) => "when that VM has ended, move its record away and restart pagodad: see the daemon's log",
        InUse::Removed => "see `pagoda snapshot ls`",
    };
    refused(format!("{name} is not removed: {why}"), Some(hint))
}
