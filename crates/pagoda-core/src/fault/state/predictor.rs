//! Which pages that come in for a read are mapped writable at once.

/// Guesses whether a page that is read will be written soon: then mapping it writable at once saves a fault, at the price
/// of a page-out that may be needless.
#[derive(Debug, Default)]
pub struct WritePredictor {
    pages: u32,
    /// Of those mapped write-protected, because only they tell: how many, and how many were written.
    seen: u32,
    written: u32,
}

impl WritePredictor {
    /// Every 16th page is mapped write-protected all the same, to go on measuring.
    const PROBE: u32 = 16;
    /// Old evidence halves at this many pages.
    const WINDOW: u32 = 256;

    /// A page came in for a read. True: map it writable.
    pub fn predict(&mut self) -> bool {
        self.pages = self.pages.wrapping_add(1);
        // A write fault costs about as much as a third of the read and write-back of a page.
        let likely = self.seen >= Self::PROBE && self.written * 3 > self.seen;
        if likely && !self.pages.is_multiple_of(Self::PROBE) {
            return true;
        }
        self.seen += 1;
        if self.seen >= Self::WINDOW {
            self.seen /= 2;
            self.written /= 2;
        }
        false
    }

    /// A clean page was written.
    pub fn note_write(&mut self) {
        self.written = (self.written + 1).min(self.seen);
    }
}

#[cfg(test)]
mod tests {
    use super::WritePredictor;

    /// Pages out of `count` that are mapped writable, while `written` of 8 pages that are not are written.
    fn writable(predictor: &mut WritePredictor, count: u32, written: u32) -> u32 {
        (0..count)
            .filter(|page| {
                let writable = predictor.predict();
                if !writable && page % 8 < written {
                    predictor.note_write();
                }
                writable
            })
            .count() as u32
    }

    #[test]
    fn pages_that_are_written_are_mapped_writable_but_for_probes() {
        let mut predictor = WritePredictor::default();
        writable(&mut predictor, 64, 8);
        assert_eq!(writable(&mut predictor, 1600, 8), 1500);
    }

    #[test]
    fn a_load_that_stops_writing_is_noticed() {
        let mut predictor = WritePredictor::default();
        writable(&mut predictor, 1000, 8);
        writable(&mut predictor, 16 * WritePredictor::WINDOW, 0);
        assert_eq!(writable(&mut predictor, 1000, 0), 0);
    }
}
