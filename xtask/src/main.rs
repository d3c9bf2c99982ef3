//! Tasks of the repository: checks, tests, guest images, the demo, and what starts the benches.

mod demo;
mod figures;
mod hang;
mod suite;
mod tasks;
mod tidy;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use testkit::{image, programs};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Tasks of the repository")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Check everything that must hold for every change
    Ci,
    /// Check the rules that no compiler checks
    Tidy,
    /// Run every test that needs no guest
    Test(tasks::TestArgs),
    /// Run the tests with real guests
    Vm(tasks::TestArgs),
    /// Make the images that test guests boot
    Image(image::ImageArgs),
    /// Compile the C programs that tests run, and name their directory
    Programs,
    /// Show a VM in a fraction of the DRAM it was promised
    Demo(demo::DemoArgs),
    /// Compare Pagoda with its peers
    #[command(disable_help_flag = true)]
    Bench(tasks::BenchArgs),
    /// Put the figures of bench/results into the README
    Figures,
}

fn main() -> ExitCode {
    match run(Cli::parse().task) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// `Ok(false)`: the task ran, and what it checked does not hold.
fn run(task: Task) -> Result<bool> {
    match task {
        Task::Ci => tasks::ci(),
        Task::Tidy => tidy::main(),
        Task::Test(args) => tasks::test(&args),
        Task::Vm(args) => tasks::vm(&args),
        Task::Image(args) => image::run(&args).map(|()| true),
        Task::Programs => programs::build().map(|directory| {
            println!("{}", directory.display());
            true
        }),
        Task::Demo(args) => demo::main(&args),
        Task::Bench(args) => tasks::bench(&args),
        Task::Figures => figures::main(),
    }
}
