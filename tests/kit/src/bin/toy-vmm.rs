//! The toy VMM as a program: memory that is written and verified, natively or by a guest on KVM, and the fault handler
//! that benches compare Pagoda with.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use testkit::peers::faults::{HandlerArgs, handler_main};
use testkit::toy::kvm::{self, ToyKvmArgs};
use testkit::toy::{self, ToyArgs};

#[derive(Parser)]
#[command(name = "toy-vmm", about = "A VMM for tests: RAM that is written and verified")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Map RAM, fill it and verify it at native speed
    Native(ToyArgs),
    /// Have a KVM guest write and verify RAM; exit status 77 where KVM cannot run it
    Kvm(ToyKvmArgs),
    /// Serve the faults of a bare userfaultfd loop (started by benches)
    #[command(hide = true)]
    UffdHandler(HandlerArgs),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().task {
        Task::Native(args) => toy::main(&args),
        Task::Kvm(args) => kvm::main(&args),
        Task::UffdHandler(args) => handler_main(&args),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) if error.is::<kvm::Skipped>() => {
            println!("skipped: {error:#}");
            ExitCode::from(kvm::SKIPPED_STATUS)
        }
        Err(error) => {
            eprintln!("toy-vmm: {error:#}");
            ExitCode::FAILURE
        }
    }
}
