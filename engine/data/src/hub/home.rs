//! The home folder in paths.

use std::path::{Path, PathBuf};

/// Replaces a leading `~/` by the home folder, as a shell does. It applies to every path of a user: in a
/// configuration and its overrides, on the command line, and in the variables of the Hub.
pub fn expand_home(path: &Path) -> PathBuf {
    expanded(path, std::env::home_dir())
}

fn expanded(path: &Path, home: Option<PathBuf>) -> PathBuf {
    match (path.strip_prefix("~"), home) {
        (Ok(rest), Some(home)) if rest.as_os_str().is_empty() => home,
        (Ok(rest), Some(home)) => home.join(rest),
        _ => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_leading_tilde_by_itself_is_the_home_folder() {
        for (path, expected) in [
            ("~/runs/x", "/srv/me/runs/x"),
            ("~", "/srv/me"),
            ("~/", "/srv/me"),
            ("a/~/x", "a/~/x"),
            ("~other/x", "~other/x"),
            ("./~/x", "./~/x"),
            ("owner/name", "owner/name"),
        ] {
            assert_eq!(expanded(Path::new(path), Some("/srv/me".into())), Path::new(expected), "{path}");
        }
    }
}
