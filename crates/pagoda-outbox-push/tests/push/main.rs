//! Pushes to real servers: nginx with WebDAV, an S3 server (moto), receivers of plain connections. Each test has its own, on the loopback.

mod files;
mod put;
mod relay;
mod rig;
mod s3;
mod servers;
mod tcp;
