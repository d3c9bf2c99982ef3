//! Requests about VMs that move between hosts. All are for the daemon's owner alone ([`super::Peer::may`]).

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Json;
use axum::routing::{get, post};
use pagoda_api::{MoveList, MoveReply, MoveRequest, MoveStatus};

use super::reply::{Refusal, Reply, Shared, ask, parse, vm_name};
use crate::moves::board;
use crate::registry::Registry;

pub fn routes() -> Router<Arc<Registry>> {
    Router::new()
        .route("/v1/vms/{name}/move", post(begin))
        .route("/v1/moves", get(list))
        .route("/v1/moves/{name}", get(show))
        .route("/v1/moves/{name}/cancel", post(cancel))
        .route("/v1/moves/{name}/resolve", post(resolve))
}

/// What has begun goes on when this is answered.
async fn begin(
    State(registry): Shared,
    name: Result<Path<String>, PathRejection>,
    body: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, Json<MoveReply>), Refusal> {
    let name = vm_name(name)?;
    let request: MoveRequest = parse(body)?;
    let reply = ask(registry, move |registry| board::begin(registry, &name, &request)).await?;
    let status = match reply.0 {
        MoveReply::Plan(_) => StatusCode::OK,
        MoveReply::Begun(_) => StatusCode::ACCEPTED,
    };
    Ok((status, reply))
}

async fn list(State(registry): Shared) -> Reply<MoveList> {
    ask(registry, |registry| Ok(board::list(registry))).await
}

async fn show(State(registry): Shared, name: Result<Path<String>, PathRejection>) -> Reply<MoveStatus> {
    let name = vm_name(name)?;
    ask(registry, move |registry| board::show(registry, &name)).await
}

async fn cancel(State(registry): Shared, name: Result<Path<String>, PathRejection>) -> Reply<MoveStatus> {
    let name = vm_name(name)?;
    ask(registry, move |registry| board::cancel(registry, &name)).await
}

async fn resolve(State(registry): Shared, name: Result<Path<String>, PathRejection>) -> Reply<MoveStatus> {
    let name = vm_name(name)?;
    ask(registry, move |registry| board::resolve(registry, &name)).await
}
