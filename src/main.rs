//! The `firebrick` program: parses arguments, runs a command, turns errors into exit codes.

#![forbid(unsafe_code)]

mod arguments;
mod checked;
mod commands;
mod console;
mod doctor;
mod explain;
mod live;
mod log;
mod new_config;
mod output;
mod planned;
mod progress;
#[cfg(test)]
#[path = "../tests/reference/mod.rs"]
mod reference;
mod report_page;
mod signals;
mod step_clock;
mod table;

use arguments::{Arguments, Command};
use firebrick::backends::allocation_limit::on_excess;
use firebrick::backends::allocator::{CountingAllocator, keep_freed_memory, on_refusal};
use firebrick::backends::device::panic_message;
use firebrick::backends::environment::without_display_server;
use firebrick::backends::kernel_cache;
use firebrick::backends::out_of_memory::OutOfMemory;
use firebrick::engine::config::Mode;
use firebrick::engine::plan::size::Bytes;
use log::Log;
use output::Stderr;
use std::backtrace::Backtrace;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The user can fix it: configuration, files, arguments.
const EXIT_USER: u8 = 2;
/// The run failed.
const EXIT_FAILED: u8 = 1;
/// An import lacks keys that results may depend on.
const EXIT_INCOMPLETE: u8 = 3;
/// A phase of the run, or another rank, hung.
const EXIT_HUNG: u8 = 4;
/// Numbers were NaN or infinite in too many consecutive optimizer steps.
const EXIT_NON_FINITE: u8 = 5;
/// A replay differs from its run.
const EXIT_DIFFERS: u8 = 6;
/// The run was stopped on request and can be resumed: `EX_TEMPFAIL`.
const EXIT_STOPPED: u8 = 75;

/// Called when an allocation fails; the process then aborts. Must not allocate.
fn report_refusal(bytes: usize) {
    let mut line = [0_u8; 512];
    let mut rest = &mut line[..];
    let written = writeln!(
        rest,
        "error: out of host memory (allocating {bytes} bytes failed). Continue from the last checkpoint with\n  \
         firebrick train CONFIG --resume --plan OUTPUT/next_plan.json\nor set memory.budget (or memory.limit) below the \
         memory available to the process."
    );
    let left = rest.len();
    live::restore();
    if written.is_ok() {
        let end = line.len() - left;
        let _ = Stderr.write_all(&line[..end]);
    }
}

/// Called when reading a file takes more memory than such a file needs. The allocation cannot fail, so the process ends.
fn report_excess(what: &str, most: usize) -> ! {
    live::restore();
    let most = Bytes(most as u64);
    let line = format!("error: {what} takes more than {most} of memory; is it damaged, or made to exhaust memory?");
    output::message(&line);
    std::process::exit(EXIT_USER.into())
}

fn main() -> ExitCode {
    without_display_server();
    on_refusal(report_refusal);
    on_excess(report_excess);
    keep_freed_memory();
    let arguments = Arguments::from_command_line();
    let filter = EnvFilter::try_from_env("FIREBRICK_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Log)
        .with_ansi(false)
        .without_time()
        .with_target(false)
        .init();
    progress::show_downloads();
    kernel_cache::enable();
    // Panics of a backend are caught at phase boundaries and reported as errors; their own output helps only
    // debugging. They are log lines, so that a live view keeps its screen.
    if std::env::var_os("RUST_BACKTRACE").is_none_or(|value| value == "0") {
        std::panic::set_hook(Box::new(|info| tracing::debug!("{info}")));
    } else {
        std::panic::set_hook(Box::new(|info| {
            tracing::error!("{info}\n{}", Backtrace::capture());
        }));
    }
    // Training catches a backend's panic at its phase; this is for everything else.
    let outcome = catch_unwind(AssertUnwindSafe(|| run(arguments.command))).unwrap_or_else(|panic| {
        Err(match OutOfMemory::in_panic(panic.as_ref()) {
            Some(what) => anyhow::anyhow!("out of memory: {what}"),
            None => anyhow::anyhow!("the device or its driver failed: {}", panic_message(panic.as_ref())),
        })
    });
    match outcome {
        Ok(code) => code,
        Err(error) => {
            output::message(&output::excerpt(&format!("error: {error:#}")));
            ExitCode::from(exit_code(&error))
        }
    }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    let done = |is_done| if is_done { ExitCode::SUCCESS } else { ExitCode::from(EXIT_STOPPED) };
    match command {
        Command::Train(args) => return commands::train::run(&args, Mode::Rl).map(done),
        Command::Sft(args) => return commands::train::run(&args, Mode::Sft).map(done),
        Command::Plan(args) => commands::plan::run(&args),
        Command::Data(args) => commands::data::run(&args),
        Command::New(args) => commands::new::run(&args),
        Command::Config(command) => commands::config::run(&command),
        Command::Bench(args) => commands::bench::run(&args),
        Command::Memory(args) => commands::memory::run(&args),
        Command::Watch(args) => commands::watch::run(&args),
        Command::Replay(args) => commands::replay::run(&args),
        Command::Report(args) => commands::report::run(&args),
        Command::Import(args) => commands::import::run(&args),
        Command::Eval(args) => commands::eval::run(&args),
        Command::Generate(args) => commands::generate::run(&args),
        Command::Logprobs(args) => commands::logprobs::run(&args),
        Command::Devices(args) => commands::devices::run(&args),
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::Completions(args) => commands::completions::run(args.shell),
    }
    .map(|()| ExitCode::SUCCESS)
}

fn exit_code(error: &anyhow::Error) -> u8 {
    use firebrick::{backends, engine, models};
    let is_user_error = error.chain().any(|cause| {
        cause.downcast_ref::<engine::Error>().is_some_and(engine::Error::is_user_error)
            || cause.downcast_ref::<models::Error>().is_some_and(models::Error::is_user_error)
            || cause.downcast_ref::<backends::Error>().is_some_and(backends::Error::is_user_error)
            || cause.downcast_ref::<engine::plan::Error>().is_some()
            || cause.downcast_ref::<engine::hub::HubError>().is_some()
            || cause.downcast_ref::<commands::UserError>().is_some()
    });
    if error.is::<commands::import::Incomplete>() {
        return EXIT_INCOMPLETE;
    }
    if error.is::<commands::replay::Differs>() {
        return EXIT_DIFFERS;
    }
    if error.chain().any(|cause| cause.downcast_ref::<engine::Error>().is_some_and(engine::Error::is_non_finite)) {
        return EXIT_NON_FINITE;
    }
    if error.chain().any(|cause| cause.downcast_ref::<engine::Error>().is_some_and(engine::Error::is_hang)) {
        return EXIT_HUNG;
    }
    if is_user_error { EXIT_USER } else { EXIT_FAILED }
}
