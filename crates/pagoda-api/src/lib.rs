//! The control API of `pagodad`: types and a small blocking client.
//!
//! HTTP/1.1 with JSON bodies over a Unix socket that only its owner may open. Routes:
//!
//! | request | body | reply |
//! |---|---|---|
//! | `GET /v1/version` | | [`Version`] |
//! | `GET /v1/health` | | [`Health`] |
//! | `GET /v1/host` | | [`HostInfo`] |
//! | `PATCH /v1/host` | [`HostPatch`] | [`HostInfo`] |
//! | `POST /v1/admit` | [`AdmitRequest`] | [`AdmitReply`] |
//! | `GET /v1/vms` | | [`VmList`] |
//! | `POST /v1/vms` | [`CreateVm`] | [`CreatedVm`] |
//! | `GET /v1/vms/NAME` | | [`VmInfo`] |
//! | `PATCH /v1/vms/NAME` | [`VmPatch`] | [`VmInfo`] |
//! | `DELETE /v1/vms/NAME` | | nothing; only a VM that nothing has attached to |
//! | `POST /v1/vms/NAME/cont` | | [`VmInfo`] |
//! | `GET /v1/vms/NAME/explain` | | [`Explain`] |
//! | `GET /v1/vms/NAME/mrc` | | [`Mrc`] |
//! | `POST /v1/vms/NAME/whatif` | [`WhatIfRequest`] | [`WhatIfReply`] |
//! | `GET /v1/vms/NAME/sample` | | [`SampleInfo`] |
//! | `POST /v1/vms/NAME/sample` | [`SampleRequest`] | [`SampleInfo`] |
//! | `GET /v1/vms/NAME/curve` | | [`CurveInfo`] |
//! | `POST /v1/vms/NAME/curve` | [`CurveSwitch`] | [`CurveInfo`] |
//! | `POST /v1/vms/NAME/snapshots` | [`CreateSnapshot`] | [`Snapshot`] |
//! | `GET /v1/snapshots` | | [`SnapshotList`] |
//! | `GET /v1/snapshots/VM/NAME` | | [`Snapshot`] |
//! | `GET /v1/snapshots/VM/NAME/diff/OTHER` | | [`SnapshotDiff`] |
//! | `GET /v1/snapshots/VM/NAME/launch` | | [`SnapshotLaunch`] |
//! | `DELETE /v1/snapshots/VM/NAME` | | [`RemovedSnapshot`] |
//! | `DELETE /v1/snapshots/ID` | | [`RemovedSnapshot`]; also for an image that cannot be read |
//! | `POST /v1/snapshots/VM/NAME/verify` | | [`VerifyReport`]; to be repeated until it is done |
//! | `GET /v1/restorable/NAME` | | [`Restorable`] |
//! | `GET /v1/crashed/NAME` | | [`CrashedVm`] |
//! | `DELETE /v1/crashed/NAME` | | nothing |
//! | `POST /v1/snapshots/VM/NAME/export` | [`ExportRequest`] | the file, then [`EXPORT_DONE`] or [`EXPORT_FAILED`] as a field behind it |
//! | `POST /v1/imports`, `POST /v1/imports/VM/NAME` | the file | [`Snapshot`] |
//! | `GET /v1/snapshots/VM/NAME/program` | | [`SnapshotLaunch`], also of one that cannot be started |
//! | `POST /v1/snapshots/VM/NAME/accept` | [`AcceptRequest`] | [`Snapshot`] |
//! | `POST /v1/restores` | [`RestoreRequest`] | [`CreatedVm`] |
//! | `GET /v1/vms/NAME/launch` | | [`SnapshotLaunch`] of a VM that is there; its `qemu` is not known |
//! | `POST /v1/clones` | [`CloneRequest`] | [`CreatedClones`]: all or none |
//! | `POST /v1/vms/NAME/move` | [`MoveRequest`] | [`MoveReply`] |
//! | `GET /v1/moves` | | [`MoveList`] |
//! | `GET /v1/moves/NAME` | | [`MoveStatus`] |
//! | `POST /v1/moves/NAME/cancel`, `POST /v1/moves/NAME/resolve` | | [`MoveStatus`] |
//! | `GET /v1/outboxes` | | [`OutboxList`] |
//! | `GET /v1/outboxes/NAME` | | [`OutboxInfo`] |
//! | `PATCH /v1/outboxes/NAME` | [`OutboxPatch`] | [`OutboxInfo`] |
//! | `GET /v1/outboxes/NAME/explain` | | [`OutboxExplanation`] |
//! | `GET /v1/hosts` | | [`HostList`] |
//! | `POST /v1/hosts` | [`TrustedHost`] | [`HostList`] |
//! | `DELETE /v1/hosts/NAME` | | [`HostList`] |
//! | `POST /v1/hosts/NAME/ping` | | [`HostPing`] |
//! | `GET /metrics` | | Prometheus text |
//!
//! NAME and VM have `%XX` for what is no ASCII letter or digit, `.`, `_` or `-` ([`vm_file_name`]).
//!
//! A status of 400 and above comes with an [`ApiError`].

pub mod attach;
mod causes;
mod client;
mod http;
mod limits;
pub mod size;
pub mod time;
pub mod types;

pub use causes::in_full;
pub use client::{Client, ClientError, socket_path};
pub use http::{BODY_BYTES_MAX, HttpError};
pub use limits::with_advice;
pub use size::parse_size;
pub use types::*;
