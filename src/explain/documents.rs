//! Which page documents a key, and under which heading.

/// The reference of all keys but the task's.
const CONFIGURATION: Page = Page {
    name: "docs/configuration.md",
    #[cfg(test)]
    text: include_str!("../../docs/configuration.md"),
};

/// The reference of the task's keys.
const TASKS: Page = Page {
    name: "docs/tasks.md",
    #[cfg(test)]
    text: include_str!("../../docs/tasks.md"),
};

/// A page and its text.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    pub name: &'static str,
    /// What it says: tests hold it to the keys.
    #[cfg(test)]
    text: &'static str,
}

/// The part of a page below a heading.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    page: Page,
    heading: &'static str,
}

impl Section {
    /// The page with the heading's anchor, as GitHub makes it.
    pub fn link(self) -> String {
        let words = self.heading.trim_start_matches('#').trim();
        let anchor: String = words
            .to_lowercase()
            .chars()
            .filter_map(|c| match c {
                ' ' => Some('-'),
                '-' | '_' => Some(c),
                c => c.is_alphanumeric().then_some(c),
            })
            .collect();
        format!("{}#{anchor}", self.page.name)
    }

    /// Its text, up to the next heading of its level; none where the page has no such heading.
    #[cfg(test)]
    fn text(self) -> Option<&'static str> {
        let (_, rest) = self.page.text.split_once(&format!("\n{}\n", self.heading))?;
        let level = self.heading.split(' ').next().unwrap_or("#").len();
        let ends = (1..=level).filter_map(|n| rest.find(&format!("\n{} ", "#".repeat(n))));
        Some(&rest[..ends.min().unwrap_or(rest.len())])
    }
}

/// Where a key is documented.
pub fn section(path: &str) -> Section {
    let of = |page, heading| Section { page, heading };
    let root = path.split('.').next().unwrap_or(path);
    match root {
        _ if path.contains("lr_scheduler") => of(CONFIGURATION, "### Learning-rate schedules"),
        _ if format!(".{path}.").contains(".optim.") => of(CONFIGURATION, "## `optim`"),
        "model" if path.starts_with("model.lora") => of(CONFIGURATION, "### `model.lora`"),
        "model" => of(CONFIGURATION, "## `model`"),
        "objective" => of(CONFIGURATION, "## `objective`"),
        "rollout" => of(CONFIGURATION, "## `rollout`"),
        "update" => of(CONFIGURATION, "## `update`"),
        "critic" => of(CONFIGURATION, "## `critic`"),
        "trainer" => of(CONFIGURATION, "## `trainer`"),
        "warmup" | "sft" => of(CONFIGURATION, "## `warmup.sft` and `sft`"),
        "device" => of(CONFIGURATION, "## `device`"),
        "precision" => of(CONFIGURATION, "## `precision`"),
        "allow_tf32" => of(CONFIGURATION, "## `allow_tf32`"),
        "deterministic" => of(CONFIGURATION, "## `deterministic`"),
        "memory" => of(CONFIGURATION, "## `memory`"),
        "task" if path.starts_with("task.rewards") => reward(path),
        "task" => task(path),
        _ => of(CONFIGURATION, "## The run folder"),
    }
}

fn reward(path: &str) -> Section {
    let python = ["file", "function", "kwargs", "python"];
    let own = path.rsplit('.').next().unwrap_or(path);
    let heading = if python.contains(&own) { "## Rewards in Python" } else { "## Rewards" };
    Section { page: TASKS, heading }
}

fn task(path: &str) -> Section {
    let countdown = ["numbers", "max_number", "max_target", "style", "format_score"];
    let arithmetic = ["difficulty", "operations", "partial", "zero_pad"];
    let calculator = ["digits", "tool"];
    let own = path.rsplit('.').next().unwrap_or(path);
    let heading = if path.starts_with("task.environment") {
        "## Several turns"
    } else if calculator.contains(&own) {
        "## Calculator"
    } else if arithmetic.contains(&own) {
        "## Arithmetic"
    } else if countdown.contains(&own) {
        "## Countdown"
    } else {
        "## Rows of files"
    };
    Section { page: TASKS, heading }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick::engine::config::keys;
    use std::collections::BTreeSet;

    /// Names between backticks: `rank`, `alpha` of `alpha: 3`, and every part of `kl_ctrl.type`.
    fn names(text: &str) -> BTreeSet<&str> {
        let spans = text.split('`').skip(1).step_by(2);
        spans.flat_map(|span| span.split([' ', '\n', ':', '=', '.', '{', '[', ',', '}', ']'])).collect()
    }

    #[test]
    fn every_key_is_named_in_the_section_that_documents_it() {
        let mut missing = Vec::new();
        for key in keys() {
            let section = section(&key.path);
            let Some(text) = section.text() else {
                panic!("{} has no heading {}", section.page.name, section.heading);
            };
            let own = key.path.rsplit('.').next().unwrap_or(&key.path);
            let by_heading = section.heading.contains(own);
            let whole = key.path.contains('.');
            if whole && !by_heading && !names(text).contains(own) {
                missing.push(format!("{} in {}", key.path, section.link()));
            }
        }
        assert!(missing.is_empty(), "{missing:#?}");
    }

    #[test]
    fn links_have_the_anchors_that_github_makes() {
        assert_eq!(section("memory.budget").link(), "docs/configuration.md#memory");
        assert_eq!(section("sft.steps").link(), "docs/configuration.md#warmupsft-and-sft");
        assert_eq!(section("critic.optim.lr_scheduler.power").link(), "docs/configuration.md#learning-rate-schedules");
        assert_eq!(section("task.name").link(), "docs/tasks.md#rows-of-files");
    }
}
