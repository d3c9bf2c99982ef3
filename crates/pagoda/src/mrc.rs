//! `pagoda vm mrc`: a VM's miss-ratio curve, drawn with characters.

use std::fmt::Write;

use pagoda_api::Mrc;

use crate::units::format_size;

/// Characters of the plot itself: with the axis it fits a terminal of 80.
const WIDTH: usize = 64;
const HEIGHT: usize = 16;
/// A tick on the horizontal axis every so many characters.
const TICK_EVERY: usize = 16;
const MARGIN: usize = 7;

/// The curve with its axes and marks, or why there is none.
pub fn plot(name: &str, mrc: &Mrc) -> String {
    let sized = mrc.points.last().map_or(0, |point| point.dram_bytes);
    let most = sized.max(mrc.memory_bytes);
    if mrc.accesses <= 0.0 || mrc.points.is_empty() || most == 0 {
        return format!(
            "nothing is known yet of the uses of {name}: the curve comes with sampling periods and with pages that \
             come back from swap\n"
        );
    }
    // The miss ratio never rises with size, so the first point is the greatest; a flat curve near 0 needs its own
    // scale.
    let top = nice_top(mrc.points.iter().map(|point| point.miss_ratio).fold(0.0, f64::max));
    let mut rows = vec![vec![' '; WIDTH]; HEIGHT];
    let column = |bytes: u64| ((bytes as f64 / most as f64) * (WIDTH - 1) as f64).round() as usize;
    for (mark, bytes) in [('|', mrc.target_bytes), (':', mrc.memory_bytes)] {
        if bytes > 0 && bytes <= most {
            rows.iter_mut().for_each(|row| row[column(bytes)] = mark);
        }
    }
    let size_at = |column: usize| (most as f64 * column as f64 / (WIDTH - 1) as f64) as u64;
    for (column, ratio) in (0..WIDTH).filter_map(|column| Some((column, ratio_at(mrc, size_at(column))?))) {
        let up = ((ratio / top).clamp(0.0, 1.0) * (HEIGHT - 1) as f64).round() as usize;
        rows[HEIGHT - 1 - up][column] = '*';
    }
    let mut text = format!("{:>MARGIN$}   {name}: part of its uses that would miss, by the DRAM it has\n", "miss");
    for (nth, row) in rows.iter().enumerate() {
        let value = top * (HEIGHT - 1 - nth) as f64 / (HEIGHT - 1) as f64;
        let label = if nth % 5 == 0 { format!("{value:.3}") } else { String::new() };
        let line: String = row.iter().collect();
        let _ = writeln!(text, "{label:>MARGIN$} |{}", line.trim_end());
    }
    let mut ticks = String::new();
    let mut axis = String::new();
    for at in (0..WIDTH).step_by(TICK_EVERY) {
        let _ = write!(axis, "+{}", "-".repeat(TICK_EVERY - 1));
        let _ = write!(ticks, "{:<TICK_EVERY$}", format_size(size_at(at)));
    }
    let _ = writeln!(text, "{:>MARGIN$} {axis}> DRAM", "");
    let _ = writeln!(text, "{:>MARGIN$} {}", "", ticks.trim_end());
    let at = |bytes: u64| ratio_at(mrc, bytes).map_or("-".into(), |ratio| format!("{ratio:.3}"));
    let _ = writeln!(
        text,
        "| target {}, where {} would miss   : memory {}   from {:.0} uses",
        format_size(mrc.target_bytes),
        at(mrc.target_bytes),
        format_size(mrc.memory_bytes),
        mrc.accesses
    );
    text
}

/// The curve at a size, as a straight line between its points; beyond its ends it is flat.
fn ratio_at(mrc: &Mrc, bytes: u64) -> Option<f64> {
    let after = mrc.points.partition_point(|point| point.dram_bytes < bytes);
    let (Some(left), Some(right)) = (after.checked_sub(1).map(|at| mrc.points[at]), mrc.points.get(after)) else {
        return mrc.points.get(after.min(mrc.points.len().checked_sub(1)?)).map(|point| point.miss_ratio);
    };
    let part = (bytes - left.dram_bytes) as f64 / (right.dram_bytes - left.dram_bytes).max(1) as f64;
    Some(left.miss_ratio + (right.miss_ratio - left.miss_ratio) * part)
}

/// The least of 1, 0.5, 0.2, 0.1, ... that is not below `most`.
fn nice_top(most: f64) -> f64 {
    let steps = [1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01];
    steps.into_iter().rev().find(|step| *step >= most).unwrap_or(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagoda_api::MrcPoint;

    fn mrc(points: &[(u64, f64)]) -> Mrc {
        let point =
            |(dram_bytes, miss_ratio): &(u64, f64)| MrcPoint { dram_bytes: *dram_bytes, miss_ratio: *miss_ratio };
        Mrc {
            accesses: 1000.0,
            memory_bytes: 4 << 30,
            target_bytes: 2 << 30,
            points: points.iter().map(point).collect(),
        }
    }

    #[test]
    fn a_curve_with_its_marks() {
        let curve = mrc(&[(0, 1.0), (1 << 30, 0.5), (2 << 30, 0.1), (4 << 30, 0.0)]);
        let text = plot("db", &curve);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), HEIGHT + 4);
        assert!(lines[1].starts_with("  1.000 |*"), "{text}");
        assert!(lines[HEIGHT].ends_with('*') && lines[HEIGHT].starts_with("  0.000 |"), "{text}");
        assert!(lines[2].contains('|') && lines[2].ends_with(':'), "{text}");
        assert_eq!(lines[HEIGHT + 1], format!("        {}> DRAM", "+---------------".repeat(4)));
        assert_eq!(lines[HEIGHT + 2].split_whitespace().collect::<Vec<_>>(), ["0", "1G", "2G", "3G"]);
        assert!(lines[HEIGHT + 3].starts_with("| target 2G, where 0.100 would miss   : memory 4G"), "{text}");
        assert!(lines.iter().all(|line| line.len() <= 80), "{text}");
        // One star in each column.
        assert_eq!(text.matches('*').count(), WIDTH);
    }

    #[test]
    fn between_points_and_beyond_them() {
        let curve = mrc(&[(100, 0.8), (200, 0.4)]);
        for (bytes, expected) in [(0, 0.8), (100, 0.8), (150, 0.6), (200, 0.4), (900, 0.4)] {
            assert!((ratio_at(&curve, bytes).unwrap() - expected).abs() < 1e-9, "{bytes}");
        }
        assert_eq!(ratio_at(&mrc(&[]), 5), None);
    }

    #[test]
    fn no_curve_yet() {
        assert!(plot("db", &Mrc::default()).contains("nothing is known yet of the uses of db"));
        // One point, and sizes of 0, are no reason to panic.
        plot("db", &Mrc { memory_bytes: 0, ..mrc(&[(0, 0.5)]) });
        plot("db", &mrc(&[(1 << 30, 0.0)]));
    }

    #[test]
    fn scales() {
        for (most, expected) in [(1.0, 1.0), (0.6, 1.0), (0.5, 0.5), (0.03, 0.05), (0.0, 0.01), (7.0, 1.0)] {
            assert_eq!(nice_top(most), expected, "{most}");
        }
    }
}
