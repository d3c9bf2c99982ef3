//! What every reply needs.

use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::folios::Folios;
use super::pacing::{Pacer, Rate};
use crate::link::client::Files;

/// Whose files are served, to whom.
#[derive(Debug)]
pub struct Site {
    /// The VM's name, the first part of each path.
    pub name: String,
    /// What a client has to know (`Authorization: Bearer TOKEN`).
    pub token: String,
    /// Different for each life of the keeper, as numbers of files begin anew.
    pub life: u64,
    pub files: Arc<Files>,
    pub folios: Folios,
    /// What all clients together may be sent.
    pub pacer: Pacer,
    /// What each connection may be sent.
    pub client_rate: Rate,
}

/// The process that serves has gone, and this one goes with it.
pub fn unanswered() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, "ask again in a moment\n").into_response()
}

pub fn not_found() -> Response {
    (StatusCode::NOT_FOUND, "there is no such file\n").into_response()
}
