//! A Dockerfile's text as logical lines: continuations joined, comments left out, heredocs attached.

use crate::error::CliError;

/// One instruction with everything that belongs to it.
#[derive(Debug, PartialEq)]
pub(super) struct Line {
    /// Where it begins, from 1.
    pub(super) number: usize,
    /// Its text, without the heredocs' bodies.
    pub(super) text: String,
    /// The heredocs that it opens, in order.
    pub(super) heredocs: Vec<Heredoc>,
}

/// `<<EOF` and what follows up to `EOF`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Heredoc {
    /// The word that ends it.
    pub(super) marker: String,
    /// Without quotes around the marker, variables in the body are replaced.
    pub(super) expands: bool,
    /// The lines, each with its newline; leading tabs are gone where `<<-` asked for that.
    pub(super) body: String,
}

pub(super) fn read(text: &str) -> Result<Vec<Line>, CliError> {
    let mut out = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((index, line)) = lines.next() {
        if is_nothing(line) {
            continue;
        }
        let mut joined = line.trim_start().to_owned();
        while let Some(head) = joined.trim_end().strip_suffix('\\') {
            let head = head.to_owned();
            let next = lines.by_ref().map(|(_, line)| line).find(|line| !is_nothing(line));
            joined = head + next.unwrap_or_default();
        }
        let mut heredocs = Vec::new();
        for opened in opened(&joined) {
            let mut body = String::new();
            let closed = lines.by_ref().any(|(_, line)| {
                let line = if opened.strips_tabs { line.trim_start_matches('\t') } else { line };
                if line != opened.marker {
                    body.push_str(line);
                    body.push('\n');
                }
                line == opened.marker
            });
            if !closed {
                let message = format!("Dockerfile line {}: heredoc {} has no end", index + 1, opened.marker);
                return Err(CliError::Usage(message));
            }
            heredocs.push(Heredoc { marker: opened.marker, expands: opened.expands, body });
        }
        out.push(Line { number: index + 1, text: joined, heredocs });
    }
    Ok(out)
}

fn is_nothing(line: &str) -> bool {
    let line = line.trim();
    line.is_empty() || line.starts_with('#')
}

struct Opened {
    marker: String,
    expands: bool,
    strips_tabs: bool,
}

/// The heredocs that a line opens. Only RUN, COPY and ADD have any; `<<<` and shifts (`1<<2`) are none.
fn opened(line: &str) -> Vec<Opened> {
    let (instruction, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    if !matches!(instruction.to_ascii_uppercase().as_str(), "RUN" | "COPY" | "ADD") {
        return Vec::new();
    }
    rest.split_whitespace().filter_map(heredoc).collect()
}

fn heredoc(word: &str) -> Option<Opened> {
    let after = word.trim_start_matches(|c: char| c.is_ascii_digit()).strip_prefix("<<")?;
    let (strips_tabs, after) = after.strip_prefix('-').map_or((false, after), |rest| (true, rest));
    let quote = after.chars().next().filter(|c| matches!(c, '"' | '\''));
    let name = quote.map_or(after, |quote| after.trim_start_matches(quote));
    let end = name.find(|c: char| !c.is_ascii_alphanumeric() && !"_.-".contains(c)).unwrap_or(name.len());
    let (marker, tail) = name.split_at(end);
    let tail = quote.map_or(Some(tail), |quote| tail.strip_prefix(quote))?;
    let fits = !marker.is_empty() && (tail.is_empty() || tail.starts_with(['>', '|', ';', '&', ')']));
    fits.then(|| Opened { marker: marker.to_owned(), expands: quote.is_none(), strips_tabs })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn markers(line: &str) -> Vec<String> {
        opened(line).into_iter().map(|opened| opened.marker).collect()
    }

    #[test]
    fn heredocs_are_told_from_shifts_and_strings() {
        assert_eq!(markers("RUN cat <<EOF >/f"), ["EOF"]);
        assert_eq!(markers("RUN cat <<EOF>/f"), ["EOF"]);
        assert_eq!(markers("COPY <<a <<-'b' /x/"), ["a", "b"]);
        for none in ["RUN echo $((1<<2))", "RUN cat <<<word", "ENV A=<<B", "RUN a <<"] {
            assert_eq!(markers(none), Vec::<String>::new(), "{none}");
        }
    }

    #[test]
    fn continuations_skip_comments_and_empty_lines() {
        let lines = read("# syntax\nRUN a \\\n # why\n\n  b\nRUN <<-\"E\"\n\tx\n\tE\n").unwrap();
        assert_eq!(lines[0], Line { number: 2, text: "RUN a   b".to_owned(), heredocs: vec![] });
        let body = Heredoc { marker: "E".to_owned(), expands: false, body: "x\n".to_owned() };
        assert_eq!(lines[1].heredocs, [body]);
        assert!(read("RUN <<EOF\nx").is_err());
    }
}
