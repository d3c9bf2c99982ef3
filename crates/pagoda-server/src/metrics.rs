//! Numbers of `pool serve` and `disk export` as Prometheus text (OpenMetrics 1.0), at the address that `--metrics` gives.
//!
//! The thread that serves pages leaves a copy of its numbers once a second and never waits: a scrape is answered by another
//! thread, from the copy. Each metric is defined once, in a table that is its documentation, too (docs/pool-metrics.md).

pub mod disk;
pub mod server;

use pagoda_api::in_full;
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use rmap::latency::{LATENCY_BUCKETS, Latency};

/// What the reply to `GET /metrics` is, so that scrapers take the right parser.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Takes the address, before there is anything to say; the same with its port.
///
/// # Errors
/// It cannot be listened at.
pub fn listen(addr: SocketAddr) -> Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(addr).with_context(|| format!("--metrics {addr}"))?;
    listener.set_nonblocking(true).context("--metrics")?;
    let addr = listener.local_addr().context("--metrics")?;
    Ok((listener, addr))
}

/// Numbers that others may ask for.
#[derive(Debug)]
pub struct Published<T> {
    latest: Arc<Mutex<T>>,
}

impl<T: Collector + Clone> Published<T> {
    /// Answers `GET /metrics` from now on.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(listener: TcpListener, first: T) -> Result<Published<T>> {
        let latest = Arc::new(Mutex::new(first));
        let shown = Arc::clone(&latest);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().context("--metrics")?;
        std::thread::Builder::new()
            .name("metrics".to_owned())
            .spawn(move || {
                let page = move || {
                    let numbers = shown.lock().unwrap_or_else(PoisonError::into_inner).clone();
                    std::future::ready(([(CONTENT_TYPE, OPEN_METRICS)], render(numbers)))
                };
                let app = Router::new().route("/metrics", get(page));
                let served: Result<()> = runtime.block_on(async {
                    let listener = tokio::net::TcpListener::from_std(listener)?;
                    Ok(axum::serve(listener, app).await?)
                });
                if let Err(error) = served {
                    eprintln!("pagoda: metrics are not answered any more: {error}", error = in_full(error.as_ref()));
                }
            })
            .context("--metrics")?;
        Ok(Published { latest })
    }

    /// Leaves newer numbers, unless somebody looks at the old ones just now.
    pub fn update(&self, change: impl FnOnce(&mut T)) {
        if let Ok(mut numbers) = self.latest.try_lock() {
            change(&mut numbers);
        }
    }
}

fn render(numbers: impl Collector) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(numbers));
    let mut text = String::new();
    // Writing to a String cannot fail; an encoder that did would leave what it wrote.
    let _ = prometheus_client::encoding::text::encode(&mut text, &registry);
    text
}

/// A metric, as its documentation has it.
#[derive(Debug, Clone, Copy)]
struct Def {
    name: &'static str,
    kind: Kind,
    #[cfg_attr(not(test), expect(dead_code, reason = "for the document"))]
    unit: &'static str,
    help: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// A metric that has one value.
struct Row<T> {
    def: Def,
    value: fn(&T) -> u64,
}

/// A table of them, whose names begin alike.
macro_rules! rows {
    ($prefix:literal, $($make:ident $name:literal, $unit:literal, $help:literal, $value:expr;)*) => {
        &[$(Row { def: $make(concat!($prefix, $name), $unit, $help), value: $value },)*]
    };
}
use rows;

const fn counter(name: &'static str, unit: &'static str, help: &'static str) -> Def {
    Def { name, kind: Kind::Counter, unit, help }
}

const fn gauge(name: &'static str, unit: &'static str, help: &'static str) -> Def {
    Def { name, kind: Kind::Gauge, unit, help }
}

/// Names and values. There is always one: an empty set would be written as a pair of braces.
type Labels<'a> = [(&'static str, &'a str)];

/// A metric that is being written.
struct Writer<'a> {
    encoder: MetricEncoder<'a>,
    kind: Kind,
}

impl Writer<'_> {
    fn value(&mut self, labels: &Labels<'_>, value: f64) -> fmt::Result {
        let labels = escaped(labels);
        let mut encoder = self.encoder.encode_family(&labels)?;
        match self.kind {
            Kind::Counter => encoder.encode_counter::<NoLabelSet, _, f64>(&value, None),
            _ => encoder.encode_gauge(&value),
        }
    }

    fn latency(&mut self, labels: &Labels<'_>, latency: &Latency) -> fmt::Result {
        let mut buckets = [(f64::MAX, 0); LATENCY_BUCKETS];
        for (bucket, (longest, count)) in buckets.iter_mut().zip(latency.buckets()) {
            *bucket = (longest.map_or(f64::MAX, |longest| longest.as_secs_f64()), count);
        }
        let (sum, count) = (latency.sum().as_secs_f64(), latency.count());
        self.encoder.encode_family(&escaped(labels))?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }
}

/// As the text format wants values; the encoder writes them unchanged.
fn escaped(labels: &Labels<'_>) -> Vec<(&'static str, String)> {
    let escape = |value: &str| value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    labels.iter().map(|(name, value)| (*name, escape(value))).collect()
}

fn metric(
    encoder: &mut DescriptorEncoder<'_>,
    def: Def,
    values: impl FnOnce(&mut Writer<'_>) -> fmt::Result,
) -> fmt::Result {
    let kind = match def.kind {
        Kind::Counter => MetricType::Counter,
        Kind::Gauge => MetricType::Gauge,
        Kind::Histogram => MetricType::Histogram,
    };
    let encoder = encoder.encode_descriptor(def.name, def.help, None, kind)?;
    values(&mut Writer { encoder, kind: def.kind })
}

#[cfg(test)]
mod tests;
