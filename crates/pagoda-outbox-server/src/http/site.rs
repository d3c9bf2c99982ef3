//! What every reply needs.

use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::folios::Folios;
use super::pacing::{Pacer, Rate};
use crate::outbox::Outbox;

/// Whose files are served, to whom.
#[derive(Debug)]
pub struct Site {
    /// The VM's name, the first part of each path.
    pub name: String,
    /// What a client has to know (`Authorization: Bearer TOKEN`).
    pub token: String,
    /// Different for each life of this process, as numbers of files begin anew.
    pub life: u64,
    pub outbox: Arc<Outbox>,
    pub folios: Arc<Folios>,
    /// What all clients together may be sent.
    pub pacer: Pacer,
    /// What each connection may be sent.
    pub client_rate: Rate,
}

pub fn not_found() -> Response {
    (StatusCode::NOT_FOUND, "there is no such file\n").into_response()
}
