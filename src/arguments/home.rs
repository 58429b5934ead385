//! The home folder in the paths of the command line.

use super::Arguments;
use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Arg, CommandFactory, FromArgMatches};
use firebrick::engine::hub::expand_home;
use std::any::TypeId;
use std::path::PathBuf;

impl Arguments {
    /// The arguments of this process. A leading `~/` in any path is the home folder.
    pub fn from_command_line() -> Self {
        let matches = with_home(Self::command()).get_matches();
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }
}

/// A command that expands the home folder in its paths and in its subcommands' paths.
fn with_home(command: clap::Command) -> clap::Command {
    let expand = |arg: Arg| {
        if arg.get_value_parser().type_id() == TypeId::of::<PathBuf>() {
            arg.value_parser(PathBufValueParser::new().map(|path| expand_home(&path)))
        } else {
            arg
        }
    };
    command.mut_args(expand).mut_subcommands(with_home)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::parser::ValuesRef;
    use std::path::Path;

    #[test]
    fn a_leading_tilde_is_the_home_folder_in_every_path_of_the_command_line() {
        fn check(command: &clap::Command, seen: &mut usize) {
            for arg in command.get_arguments().filter(|arg| arg.get_value_parser().type_id() == TypeId::of::<PathBuf>())
            {
                let id = arg.get_id().as_str();
                let mut arguments = Vec::new();
                if let Some(long) = arg.get_long() {
                    arguments.push(format!("--{long}"));
                }
                arguments.push("~/place".to_owned());
                // only this argument, so that what else a command needs does not matter
                let alone = clap::Command::new("test").no_binary_name(true).arg(arg.clone().required(false));
                let matches = with_home(alone).try_get_matches_from(arguments).unwrap();
                let mut paths: ValuesRef<'_, PathBuf> = matches.get_many(id).unwrap();
                let home = expand_home(Path::new("~/place"));
                assert!(!home.starts_with("~") && paths.all(|path| *path == home), "{id}");
                *seen += 1;
            }
            for inner in command.get_subcommands() {
                check(inner, seen);
            }
        }
        let (mut seen, mut command) = (0, Arguments::command());
        command.build();
        check(&command, &mut seen);
        assert!(seen > 20, "{seen}");
    }
}
