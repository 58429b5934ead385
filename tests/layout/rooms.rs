//! The order of rooms, as `docs/internals/architecture.md` has it.

/// Rooms from the lowest to the highest: paths of folders and files from the workspace's root, without `.rs`.
pub struct Rooms(Vec<String>);

impl Rooms {
    /// Reads the fenced block under the heading `Rooms`: the first word of each line is a room.
    ///
    /// # Panics
    /// If the page has no such block.
    pub fn of_page(page: &str) -> Self {
        let (_, section) =
            page.split_once("## Rooms\n").expect("docs/internals/architecture.md has a heading `## Rooms`");
        let block = section.split("```").nth(1).expect("a fenced block under it");
        let lines = block.lines().skip(1);
        let first = |line: &str| line.split_whitespace().next().map(str::to_owned);
        Self(lines.filter_map(first).collect())
    }

    pub fn names(&self) -> &[String] {
        &self.0
    }

    /// The room of a file: the longest that its path begins with, by its place in the order.
    pub fn of(&self, file: &str) -> Option<usize> {
        let holds = |room: &str| {
            let rest = file.strip_prefix(room);
            rest.is_some_and(|rest| rest.starts_with('/') || rest == ".rs")
        };
        let own = self.0.iter().enumerate().filter(|(_, room)| holds(room));
        own.max_by_key(|(_, room)| room.len()).map(|(place, _)| place)
    }
}
