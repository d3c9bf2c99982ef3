//! Requests about other hosts.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, State};
use axum::routing::{delete, get, post};
use pagoda_api::{HostList, HostPing, TrustedHost};

use super::reply::{Refusal, Reply, Shared, ask, bad_request, parse};
use crate::hosts;
use crate::registry::Registry;

pub fn routes() -> Router<Arc<Registry>> {
    Router::new()
        .route("/v1/hosts", get(list).post(trust))
        .route("/v1/hosts/{name}", delete(untrust))
        .route("/v1/hosts/{name}/ping", post(ping))
}

async fn list(State(registry): Shared) -> Reply<HostList> {
    ask(registry, hosts::list).await
}

async fn trust(State(registry): Shared, body: Result<Bytes, BytesRejection>) -> Reply<HostList> {
    let host: TrustedHost = parse(body)?;
    ask(registry, move |registry| hosts::trust(registry, &host)).await
}

async fn untrust(State(registry): Shared, name: Result<Path<String>, PathRejection>) -> Reply<HostList> {
    let name = host_name(name)?;
    ask(registry, move |registry| hosts::untrust(registry, &name)).await
}

async fn ping(State(registry): Shared, name: Result<Path<String>, PathRejection>) -> Reply<HostPing> {
    let name = host_name(name)?;
    ask(registry, move |registry| hosts::ping(registry, &name)).await
}

fn host_name(name: Result<Path<String>, PathRejection>) -> Result<String, Refusal> {
    match name {
        Ok(Path(name)) => Ok(name),
        Err(error) => Err(bad_request(format!("the name of the host cannot be read: {}", error.body_text()))),
    }
}
