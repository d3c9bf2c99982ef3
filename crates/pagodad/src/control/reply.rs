//! What all requests have in common: how the registry is asked, and how errors come back.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Json, Response};
use pagoda_api::{ApiError, ErrorCode};
use serde::de::DeserializeOwned;

use crate::registry::Registry;

/// Largest body of a request: the longest sensible one, a VM with all its regions, is below 4 KiB.
pub(super) const BODY_BYTES_MAX: usize = 64 << 10;

pub(super) type Shared = State<Arc<Registry>>;

pub(super) type Reply<T> = Result<Json<T>, Refusal>;

/// Calls the registry where waiting harms nobody.
pub(super) async fn ask<T: Send + 'static>(
    registry: Arc<Registry>,
    call: impl FnOnce(&Arc<Registry>) -> Result<T, ApiError> + Send + 'static,
) -> Reply<T> {
    match tokio::task::spawn_blocking(move || call(&registry)).await {
        Ok(result) => Ok(Json(result?)),
        Err(error) => {
            tracing::error!(%error, "a control request failed");
            Err(Refusal(ApiError {
                code: ErrorCode::Internal,
                message: "the daemon failed at this request".into(),
                hint: Some("see its log: journalctl -u pagodad".into()),
            }))
        }
    }
}

/// An error on its way to the client.
#[derive(Debug)]
pub(super) struct Refusal(pub(super) ApiError);

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(self.0)).into_response()
    }
}

pub(super) fn bad_request(message: String) -> Refusal {
    Refusal(ApiError::new(ErrorCode::BadRequest, message, None))
}

/// Bodies are JSON whatever their content type says: a plain `curl --data` works too.
pub(super) fn parse<T: DeserializeOwned>(body: Result<Bytes, BytesRejection>) -> Result<T, Refusal> {
    let body = body.map_err(|error| {
        bad_request(format!("the body cannot be read (it may have {BODY_BYTES_MAX} bytes): {}", error.body_text()))
    })?;
    serde_json::from_slice(&body)
        .map_err(|error| bad_request(format!("the body is not the JSON expected here: {error}")))
}

pub(super) fn vm_name(name: Result<Path<String>, PathRejection>) -> Result<String, Refusal> {
    match name {
        Ok(Path(name)) => Ok(name),
        Err(error) => Err(bad_request(format!("the name of the VM cannot be read: {}", error.body_text()))),
    }
}
