//! Routes of snapshots. All are for the daemon's owner alone ([`super::Peer::may`]): images have guest memory in them, and their
//! manifests have command lines.

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::response::{Json, Response};
use axum::routing::{delete, get, post};
use pagoda_api::{
    AcceptRequest, CLONE_BODY_BYTES_MAX, CloneRequest, CrashedVm, CreateSnapshot, CreatedClones, CreatedVm,
    ExportRequest, RemovedSnapshot, Restorable, RestoreRequest, Snapshot, SnapshotDiff, SnapshotLaunch, SnapshotList,
    SnapshotName, VerifyReport,
};

use super::reply::{Refusal, Reply, Shared, ask, bad_request, parse, vm_name};
use super::transfers;
use crate::images::Which;
use crate::registry::Registry;
use crate::snapshots;

/// Names of a VM and of its snapshot.
type Names = Result<Path<(String, String)>, PathRejection>;

pub fn routes() -> Router<Arc<Registry>> {
    Router::new()
        .route("/v1/vms/{name}/snapshots", post(take))
        .route("/v1/restores", post(restore))
        .route("/v1/clones", post(clone_vms).layer(DefaultBodyLimit::max(CLONE_BODY_BYTES_MAX)))
        .route("/v1/vms/{name}/launch", get(vm_launch))
        .route("/v1/restorable/{name}", get(restorable))
        .route("/v1/crashed/{name}", get(crashed).delete(forget_crashed))
        .route("/v1/snapshots", get(list))
        .route("/v1/snapshots/{vm}", delete(remove_image))
        .route("/v1/snapshots/{vm}/{name}", get(show).delete(remove))
        .route("/v1/snapshots/{vm}/{name}/diff/{other}", get(diff))
        .route("/v1/snapshots/{vm}/{name}/launch", get(launch))
        .route("/v1/snapshots/{vm}/{name}/verify", post(verify))
        .route("/v1/snapshots/{vm}/{name}/export", post(export))
        .route("/v1/snapshots/{vm}/{name}/program", get(program))
        .route("/v1/snapshots/{vm}/{name}/accept", post(accept))
        .route("/v1/imports", post(import))
        .route("/v1/imports/{vm}/{name}", post(import_as))
}

async fn take(
    State(registry): Shared,
    name: Result<Path<String>, PathRejection>,
    body: Result<Bytes, BytesRejection>,
) -> Reply<Snapshot> {
    let name = vm_name(name)?;
    let request: CreateSnapshot = parse(body)?;
    ask(registry, move |registry| snapshots::take(registry, &name, &request)).await
}

async fn restore(State(registry): Shared, body: Result<Bytes, BytesRejection>) -> Reply<CreatedVm> {
    let request: RestoreRequest = parse(body)?;
    ask(registry, move |registry| snapshots::restore(registry, &request)).await
}

async fn clone_vms(State(registry): Shared, body: Result<Bytes, BytesRejection>) -> Reply<CreatedClones> {
    let request: CloneRequest = parse(body)?;
    ask(registry, move |registry| snapshots::clone_vms(registry, &request)).await
}

async fn vm_launch(State(registry): Shared, name: Result<Path<String>, PathRejection>) -> Reply<SnapshotLaunch> {
    let name = vm_name(name)?;
    ask(registry, move |registry| snapshots::launch(registry, &name)).await
}

async fn restorable(State(registry): Shared, name: Result<Path<String>, PathRejection>) -> Reply<Restorable> {
    let name = vm_name(name)?;
    ask(registry, move |registry| snapshots::restorable(registry, &name)).await
}

async fn crashed(State(registry): Shared, name: Result<Path<String>, PathRejection>) -> Reply<CrashedVm> {
    let name = vm_name(name)?;
    ask(registry, move |registry| snapshots::crashed_one(registry, &name)).await
}

async fn forget_crashed(
    State(registry): Shared,
    name: Result<Path<String>, PathRejection>,
) -> Result<StatusCode, Refusal> {
    let name = vm_name(name)?;
    let _: Json<()> = ask(registry, move |registry| snapshots::forget_crashed(registry, &name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn diff(
    State(registry): Shared,
    names: Result<Path<(String, String, String)>, PathRejection>,
) -> Reply<SnapshotDiff> {
    let (first, second) = match names {
        Ok(Path((vm, first, second))) => (SnapshotName::new(&*vm, first), SnapshotName::new(vm, second)),
        Err(error) => {
            return Err(bad_request(format!("the names of the snapshots cannot be read: {}", error.body_text())));
        }
    };
    [&first, &second].into_iter().try_for_each(SnapshotName::check).map_err(bad_request)?;
    ask(registry, move |registry| snapshots::diff(registry, &first, &second)).await
}

async fn list(State(registry): Shared) -> Reply<SnapshotList> {
    ask(registry, |registry| snapshots::list(registry)).await
}

async fn show(State(registry): Shared, names: Names) -> Reply<Snapshot> {
    let name = snapshot_name(names)?;
    ask(registry, move |registry| snapshots::get(registry, &name)).await
}

async fn launch(State(registry): Shared, names: Names) -> Reply<SnapshotLaunch> {
    let name = snapshot_name(names)?;
    ask(registry, move |registry| {
        let launch = registry.images.launch(&name)?;
        let program_version = registry.programs.version_of(std::path::Path::new(&launch.launch.program));
        Ok(SnapshotLaunch { shim: Some(registry.config.shim.clone()), program_version, ..launch })
    })
    .await
}

async fn verify(State(registry): Shared, names: Names) -> Reply<VerifyReport> {
    let name = snapshot_name(names)?;
    ask(registry, move |registry| registry.images.verify(&name)).await
}

async fn export(
    State(registry): Shared,
    names: Names,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Refusal> {
    let name = snapshot_name(names)?;
    let request: ExportRequest = parse(body)?;
    let Json(export) =
        ask(registry, move |registry| snapshots::begin_export(&registry.images, &name, &request)).await?;
    transfers::reply_with(export)
}

async fn import(State(registry): Shared, body: Body) -> Reply<Snapshot> {
    transfers::import(registry, None, body).await
}

async fn import_as(State(registry): Shared, names: Names, body: Body) -> Reply<Snapshot> {
    let name = snapshot_name(names)?;
    transfers::import(registry, Some(name), body).await
}

async fn program(State(registry): Shared, names: Names) -> Reply<SnapshotLaunch> {
    let name = snapshot_name(names)?;
    ask(registry, move |registry| snapshots::program(&registry.images, &name)).await
}

async fn accept(State(registry): Shared, names: Names, body: Result<Bytes, BytesRejection>) -> Reply<Snapshot> {
    let name = snapshot_name(names)?;
    let request: AcceptRequest = parse(body)?;
    ask(registry, move |registry| snapshots::accept(&registry.images, &name, &request.id)).await
}

async fn remove(State(registry): Shared, names: Names) -> Reply<RemovedSnapshot> {
    remove_which(registry, Which::Named(snapshot_name(names)?)).await
}

async fn remove_image(State(registry): Shared, id: Result<Path<String>, PathRejection>) -> Reply<RemovedSnapshot> {
    let unreadable =
        |error: PathRejection| bad_request(format!("the image's id cannot be read: {}", error.body_text()));
    let Path(id) = id.map_err(unreadable)?;
    let id = id.parse().map_err(|error| bad_request(format!("{id:?} names no image: {error}")))?;
    remove_which(registry, Which::Id(id)).await
}

async fn remove_which(registry: Arc<Registry>, which: Which) -> Reply<RemovedSnapshot> {
    ask(registry, move |registry| snapshots::remove(registry, &which)).await
}

fn snapshot_name(names: Names) -> Result<SnapshotName, Refusal> {
    match names {
        Ok(Path((vm, name))) => {
            let name = SnapshotName::new(vm, name);
            name.check().map_err(bad_request)?;
            Ok(name)
        }
        Err(error) => Err(bad_request(format!("the name of the snapshot cannot be read: {}", error.body_text()))),
    }
}
