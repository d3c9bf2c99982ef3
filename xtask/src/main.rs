//! Tasks of the repository: checks, tests, guest image, demo, benches, the toy VMM.

mod bench;
mod daemon;
mod demo;
mod figures;
mod hang;
mod image;
mod programs;
mod suite;
mod tasks;
mod tidy;
mod toy;
mod toy_kvm;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

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
    Bench(bench::BenchArgs),
    /// Put the figures of bench/results into the README
    Figures,
    /// Map RAM, fill it and verify it at native speed
    Toy(toy::ToyArgs),
    /// Have a KVM guest write and verify RAM; exit status 77 where KVM cannot run it
    ToyKvm(toy_kvm::ToyKvmArgs),
    /// Serve the faults of a bare userfaultfd loop (started by benches)
    #[command(hide = true)]
    UffdHandler(bench::HandlerArgs),
}

fn main() -> ExitCode {
    match run(Cli::parse().task) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) if error.is::<toy_kvm::Skipped>() => {
            println!("skipped: {error:#}");
            ExitCode::from(toy_kvm::SKIPPED_STATUS)
        }
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
        Task::Bench(args) => bench::main(&args),
        Task::Figures => figures::main(),
        Task::Toy(args) => toy::main(&args),
        Task::ToyKvm(args) => toy_kvm::main(&args),
        Task::UffdHandler(args) => bench::handler_main(&args),
    }
}
