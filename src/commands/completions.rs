//! `firebrick completions`.

use crate::arguments::Arguments;
use crate::output;
use clap::CommandFactory;
use clap_complete::{Shell, generate};

pub fn run(shell: Shell) -> anyhow::Result<()> {
    let mut script = Vec::new();
    generate(shell, &mut Arguments::command(), "firebrick", &mut script);
    output::print_raw(&String::from_utf8(script)?)
}
