//! Results of benches, in `bench/results`: which benches there are, what each measures, on which machine, in which format.
//!
//! Those who fill figures into documents read what the benches wrote, without a part in measuring it.

pub mod benches;
pub mod code;
pub mod machine;
pub mod report;
