//! The report as an HTML file: a page with its style, its program and its data inside.

use firebrick::report::Report;

const PAGE: &str = include_str!("report/page.html");
const STYLE: &str = include_str!("report/style.css");

/// The page's program, in the order in which its parts build on each other.
const PROGRAM: [&str; 10] = [
    include_str!("report/base.js"),
    include_str!("report/chart.js"),
    include_str!("report/overview.js"),
    include_str!("report/curves.js"),
    include_str!("report/memory.js"),
    include_str!("report/time.js"),
    include_str!("report/tokens.js"),
    include_str!("report/samples.js"),
    include_str!("report/settings.js"),
    include_str!("report/app.js"),
];

/// The file's text. Only the data block has content of a run, and it has no `<`.
pub fn html(report: &Report) -> String {
    let (before_style, rest) = split(PAGE, "/*STYLE*/");
    let (before_data, rest) = split(rest, "/*DATA*/");
    let (before_program, end) = split(rest, "/*PROGRAM*/");
    let data = report.to_json();
    let program = PROGRAM.concat();
    [before_style, STYLE, before_data, &data, before_program, &program, end].concat()
}

fn split(page: &'static str, mark: &str) -> (&'static str, &'static str) {
    page.split_once(mark).expect("a mark of the page in this repository")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_loads_nothing_and_its_parts_cannot_end_it() {
        let runs = Vec::new();
        let report = Report { format: "firebrick.report", version: 1, program: "0", runs };
        let html = html(&report);
        for load in ["src=", "<link", "@import", "url(", "fetch(", "import(", "eval("] {
            assert!(!html.contains(load), "{load}");
        }
        // the data block's and the program's
        assert_eq!(html.matches("</script").count(), 2);
        assert_eq!(html.matches("</style").count(), 1);
    }
}
