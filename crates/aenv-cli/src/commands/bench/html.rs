//! Reports as one page that needs nothing from anywhere else: no script, no style sheet, no font.

use serde_json::Value;

use super::{
    plot::{bars, svg},
    report::{self, columns},
};
use crate::output::cell;

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1f2328}\
table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}th,td{padding:.25rem .75rem;border-bottom:1px solid #d1d9e0;text-align:right;white-space:nowrap}\
th:first-child,td:first-child{text-align:left}figure{margin:1.5rem 0;max-width:46rem}svg{width:100%;height:auto;font-size:12px}\
.grid{stroke:#d1d9e0}.end{text-anchor:end}.middle{text-anchor:middle}.note{color:#59636e}";

/// The page.
pub(super) fn page(reports: &[Value]) -> String {
    let sections: String = reports.iter().map(section).collect();
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>aenv bench</title><style>{STYLE}</style></head>\n<body>\n<h1>aenv bench</h1>\n{sections}</body></html>\n"
    )
}

fn section(report: &Value) -> String {
    let rows = report["results"].as_array().map(Vec::as_slice).unwrap_or_default();
    let columns = columns(rows);
    let heads: String = columns.iter().map(|(heading, _)| format!("<th>{}</th>", escape(heading))).collect();
    let line = |row: &Value| {
        let cells: String =
            columns.iter().map(|(_, field)| format!("<td>{}</td>", escape(&cell(row, field)))).collect();
        format!("<tr>{cells}</tr>\n")
    };
    let body: String = rows.iter().map(line).collect();
    let errors: String =
        report::errors(rows).iter().map(|text| format!("<p class=\"note\">{}</p>\n", escape(text))).collect();
    let times = figure("from p50 (dot) to p99, and the floor (mark), in ms", bars(rows));
    let plots = report["plots"].as_array().into_iter().flatten();
    let plots: String = plots.map(|plot| figure(&cell(plot, "title"), svg(plot))).collect();
    format!(
        "<section>\n<h2>{}</h2>\n<p class=\"note\">{}</p>\n<table><thead><tr>{heads}</tr></thead><tbody>\n{body}</tbody></table>\n{errors}{times}{plots}</section>\n",
        escape(&cell(report, "suite")),
        escape(&report::described(report)),
    )
}

fn figure(title: &str, picture: String) -> String {
    if picture.is_empty() {
        return picture;
    }
    format!("<figure><figcaption>{}</figcaption>{picture}</figure>\n", escape(title))
}

/// Text that is shown as it is.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn nothing_that_was_measured_becomes_markup() {
        let evil = "</table><script>alert('1')</script>";
        let report = json!({
            "suite": evil, "template": evil, "machine": { "cpu": evil },
            "results": [{ "operation": evil, "n": 1, "p50": 2.5, "p99": 3, "failed": 1, "errors": { evil: 1 } }],
            "plots": [{ "title": evil, "x": evil, "y": evil, "lines": [{ "name": evil, "points": [[1, 2, 3]] }] }],
        });
        let page = page(&[report]);
        assert!(!page.contains("<script") && page.contains("&lt;script&gt;alert(&#39;1&#39;)"));
        assert_eq!((page.matches("<table>").count(), page.matches("<svg").count()), (1, 2));
        assert!(page.contains("<td>2.5</td>"));
    }

    #[test]
    fn a_page_of_anything_is_a_page() {
        for odd in [json!(null), json!([1]), json!({ "results": 3, "plots": "x" })] {
            assert!(super::page(&[odd]).ends_with("</html>\n"));
        }
    }
}
