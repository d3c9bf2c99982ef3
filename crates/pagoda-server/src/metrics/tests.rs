use std::time::Duration;

use rmap::client::ClientStats;

use super::disk::DiskNumbers;
use super::*;

const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/pool-metrics.md");

const INTRODUCTION: &str = "\
# Metrics of the pool

`pagoda disk export --metrics ADDR:PORT` and `pagoda pool serve --metrics ADDR:PORT` answer `GET /metrics` in the text format of
Prometheus (OpenMetrics 1.0). Numbers are a second old at most; of copies of a disk that is read
beside its writer, as old as the last read. A counter begins with its process. Those of VMs and of their remote
tiers are `pagodad`'s: [metrics.md](metrics.md).

A failure drill shows in `pagoda_disk_server_up`, `pagoda_disk_short_bytes` (back to 0 when all copies are made again) and
`pagoda_disk_lost_slabs_total` (0 as long as every part had another copy).

| name | type | labels | unit | |
|---|---|---|---|---|
";

fn document() -> String {
    let row = |(def, labels): (Def, &str)| {
        let (suffix, kind) = match def.kind {
            Kind::Counter => ("_total", "counter"),
            Kind::Gauge => ("", "gauge"),
            Kind::Histogram => ("", "histogram"),
        };
        format!("| `{}{suffix}` | {kind} | {labels} | {} | {} |\n", def.name, def.unit, def.help)
    };
    let rows: String = disk::defs().chain(server::defs()).map(row).collect();
    format!("{INTRODUCTION}{rows}")
}

/// Run it with `PAGODA_WRITE_DOCS=1` to write the document anew.
#[test]
fn the_document_has_every_metric() {
    if std::env::var_os("PAGODA_WRITE_DOCS").is_some() {
        std::fs::write(DOCUMENT, document()).unwrap();
    }
    let hint =
        "PAGODA_WRITE_DOCS=1 cargo test --profile ci -p pagoda-server the_document_has writes docs/pool-metrics.md";
    assert!(std::fs::read_to_string(DOCUMENT).unwrap() == document(), "{hint}");
}

#[test]
fn a_scraper_reads_it() {
    let mut numbers = DiskNumbers::new("a\"b");
    let mut stats = ClientStats { writes: 3, ..ClientStats::default() };
    stats.reads_took[0].record(Duration::from_micros(3));
    stats.reads_took[0].record(Duration::from_secs(60));
    numbers.set_stats(stats);
    let text = render(numbers);
    for line in [
        "# TYPE pagoda_disk_writes counter",
        "pagoda_disk_writes_total{disk=\"a\\\"b\"} 3.0",
        "pagoda_disk_read_seconds_bucket{le=\"0.000002\",disk=\"a\\\"b\",class=\"demand\"} 0",
        "pagoda_disk_read_seconds_bucket{le=\"0.000004\",disk=\"a\\\"b\",class=\"demand\"} 1",
        "pagoda_disk_read_seconds_bucket{le=\"+Inf\",disk=\"a\\\"b\",class=\"demand\"} 2",
        "pagoda_disk_read_seconds_count{disk=\"a\\\"b\",class=\"demand\"} 2",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    assert!(text.ends_with("# EOF\n"));
}
