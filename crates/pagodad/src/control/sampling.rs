//! Routes of sampling periods and miss-ratio curves.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, State};
use axum::routing::get;
use pagoda_api::{CurveInfo, CurveSwitch, SampleInfo, SampleRequest};

use super::reply::{Reply, Shared, ask, parse, vm_name};
use crate::registry::Registry;

type Name = Result<Path<String>, PathRejection>;
type Body = Result<Bytes, BytesRejection>;

pub fn routes() -> Router<Arc<Registry>> {
    Router::new()
        .route("/v1/vms/{name}/sample", get(sampled).post(sample))
        .route("/v1/vms/{name}/curve", get(curve).post(watch_curve))
}

async fn sampled(State(registry): Shared, name: Name) -> Reply<SampleInfo> {
    let name = vm_name(name)?;
    ask(registry, move |registry| registry.sampled(&name)).await
}

async fn sample(State(registry): Shared, name: Name, body: Body) -> Reply<SampleInfo> {
    let name = vm_name(name)?;
    let request: SampleRequest = parse(body)?;
    ask(registry, move |registry| registry.sample(&name, &request)).await
}

async fn curve(State(registry): Shared, name: Name) -> Reply<CurveInfo> {
    let name = vm_name(name)?;
    ask(registry, move |registry| registry.curve(&name)).await
}

async fn watch_curve(State(registry): Shared, name: Name, body: Body) -> Reply<CurveInfo> {
    let name = vm_name(name)?;
    let switch: CurveSwitch = parse(body)?;
    ask(registry, move |registry| registry.watch_curve(&name, switch)).await
}
