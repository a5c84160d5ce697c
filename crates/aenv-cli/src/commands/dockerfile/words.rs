//! Words, quotes and variables of a Dockerfile.

use std::collections::BTreeMap;

/// Words with quotes and backslashes taken away.
pub(super) fn shell_words(text: &str) -> Vec<String> {
    let (mut words, mut word, mut quoted, mut any) = (Vec::new(), String::new(), None, false);
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (quoted, c) {
            (Some(open), c) if c == open => quoted = None,
            (Some('\''), c) => word.push(c),
            (_, '\\') => word.extend(chars.next()),
            (None, '"' | '\'') => (quoted, any) = (Some(c), true),
            (None, c) if c.is_whitespace() => {
                if any || !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                any = false;
            }
            (_, c) => word.push(c),
        }
    }
    if any || !word.is_empty() {
        words.push(word);
    }
    words
}

/// The text as one word of a shell.
pub(super) fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The variables that a stage knows: its `ARG`s and those of its `ENV`s whose value needs nothing from the image.
#[derive(Clone, Debug, Default)]
pub(super) struct Variables(BTreeMap<String, String>);

impl Variables {
    pub(super) fn get(&self, name: &str) -> Option<&String> {
        self.0.get(name)
    }

    /// A value that still names a variable belongs to the image: the server, which knows it, will replace it.
    pub(super) fn set(&mut self, name: &str, value: &str) {
        if value.contains('$') {
            self.0.remove(name);
        } else {
            self.0.insert(name.to_owned(), value.to_owned());
        }
    }

    /// Replaces every variable; unknown ones are empty.
    pub(super) fn replace_all(&self, text: &str) -> String {
        replace(text, |name| Some(self.0.get(name).cloned().unwrap_or_default()))
    }

    /// Replaces what is known here and leaves the rest to the server.
    pub(super) fn replace_known(&self, text: &str) -> String {
        replace(text, |name| self.0.get(name).cloned())
    }
}

/// `$NAME`, `${NAME}`, `${NAME:-default}` and `${NAME:+instead}`. `value` is None for a name that is not known.
fn replace(text: &str, value: impl Fn(&str) -> Option<String>) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        if out.ends_with('\\') {
            out.push('$');
            rest = &rest[at + 1..];
            continue;
        }
        let after = &rest[at + 1..];
        let (inner, end) = match after.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
            Some((inner, _)) => (inner, at + inner.len() + 3),
            None => {
                let len = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(after.len());
                (&after[..len], at + 1 + len)
            }
        };
        let set = |name: &str| value(name).filter(|value| !value.is_empty());
        if let Some((name, default)) = inner.split_once(":-") {
            out.push_str(&set(name).unwrap_or_else(|| default.to_owned()));
        } else if let Some((name, instead)) = inner.split_once(":+") {
            out.push_str(if set(name).is_some() { instead } else { "" });
        } else {
            match value(inner) {
                Some(value) if !inner.is_empty() => out.push_str(&value),
                _ => out.push_str(&rest[at..end]),
            }
        }
        rest = &rest[end..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_lose_their_quotes() {
        assert_eq!(shell_words(r#"a "b c" 'd\' e\ f """#), ["a", "b c", r"d\", "e f", ""]);
    }

    #[test]
    fn variables_in_all_their_forms() {
        let mut variables = Variables::default();
        variables.set("A", "1");
        variables.set("EMPTY", "");
        variables.set("PATH", "/x:$PATH");
        let known = |text: &str| variables.replace_known(text);
        assert_eq!(known("$A-${A}-$B-${B}-$"), "1-1-$B-${B}-$");
        assert_eq!(known("${A:-x}${B:-x}${EMPTY:-x}"), "1xx");
        assert_eq!(known("${A:+x}${B:+x}${EMPTY:+x}"), "x");
        assert_eq!(known(r"\$A"), r"\$A");
        assert_eq!(known("$PATH"), "$PATH");
        assert_eq!(variables.replace_all("a$B-$A"), "a-1");
    }
}
