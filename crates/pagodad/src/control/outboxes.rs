//! The routes of the control API for outboxes.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, State};
use axum::routing::get;
use pagoda_api::{OutboxExplanation, OutboxInfo, OutboxList, OutboxPatch};

use super::reply::{Reply, Shared, ask, parse, vm_name};
use crate::registry::Registry;

type Name = Result<Path<String>, PathRejection>;

pub fn routes() -> Router<Arc<Registry>> {
    Router::new()
        .route("/v1/outboxes", get(list))
        .route("/v1/outboxes/{name}", get(info).patch(patch))
        .route("/v1/outboxes/{name}/explain", get(explain))
}

async fn list(State(registry): Shared) -> Reply<OutboxList> {
    ask(registry, |registry| Ok(registry.list_outboxes())).await
}

async fn info(State(registry): Shared, name: Name) -> Reply<OutboxInfo> {
    let name = vm_name(name)?;
    ask(registry, move |registry| registry.get_outbox(&name)).await
}

async fn explain(State(registry): Shared, name: Name) -> Reply<OutboxExplanation> {
    let name = vm_name(name)?;
    ask(registry, move |registry| registry.explain_outbox(&name)).await
}

async fn patch(State(registry): Shared, name: Name, body: Result<Bytes, BytesRejection>) -> Reply<OutboxInfo> {
    let name = vm_name(name)?;
    let patch: OutboxPatch = parse(body)?;
    ask(registry, move |registry| registry.set_outbox(&name, &patch)).await
}
