//! `COPY` and `ADD`.

use super::{Heredoc, Origin, Step, words::Variables};

/// Ends of names whose files `ADD` would unpack.
const ARCHIVES: [&str; 8] = [".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst"];

/// A step for each source. `stage_of` finds an earlier stage by name or number.
pub(super) fn steps(
    instruction: &str,
    rest: &str,
    heredocs: &[Heredoc],
    variables: &Variables,
    stage_of: &dyn Fn(&str) -> Option<usize>,
) -> Result<Vec<Step>, String> {
    let (mut owner, mut mode, mut origin) = (String::new(), String::new(), Origin::Context);
    let mut rest = rest;
    while rest.starts_with("--") {
        let (flag, after) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        rest = after.trim_start();
        match flag.split_once('=') {
            Some(("--chown", value)) => owner = variables.replace_known(value),
            Some(("--chmod", value)) => mode = variables.replace_known(value),
            Some(("--from", value)) if instruction == "COPY" => {
                let name = variables.replace_known(value);
                origin = stage_of(&name).map_or(Origin::Image(name), Origin::Stage);
            }
            // About docker's own layers.
            _ if flag == "--link" || flag.starts_with("--link=") => {}
            _ => return Err(format!("{instruction} {flag} is not supported")),
        }
    }
    let words: Vec<String> = if rest.starts_with('[') {
        serde_json::from_str(rest).map_err(|_| format!("{instruction}'s list cannot be read"))?
    } else {
        rest.split_whitespace().map(str::to_owned).collect()
    };
    let Some((destination, sources)) = words.split_last().filter(|(_, sources)| !sources.is_empty()) else {
        return Err(format!("{instruction} needs a source and a destination"));
    };
    let mut destination = variables.replace_known(destination);
    if sources.len() > 1 && !destination.ends_with('/') {
        destination.push('/');
    }
    let mut texts = heredocs.iter();
    let mut steps = Vec::with_capacity(sources.len());
    for source in sources {
        let (origin, source) = if source.starts_with("<<") {
            let text = texts.next().ok_or_else(|| format!("{source} opens no heredoc"))?;
            let body = if text.expands { variables.replace_known(&text.body) } else { text.body.clone() };
            (Origin::Text(body), text.marker.clone())
        } else {
            let source = variables.replace_known(source);
            if instruction == "ADD" {
                plain_file(&source)?;
            }
            (origin.clone(), source)
        };
        let (destination, owner, mode) = (destination.clone(), owner.clone(), mode.clone());
        steps.push(Step::Copy { origin, source, destination, owner, mode });
    }
    Ok(steps)
}

/// `ADD` fetches and unpacks, `COPY` does not: what it would treat otherwise is refused.
fn plain_file(source: &str) -> Result<(), String> {
    if source.contains("://") || source.starts_with("git@") {
        return Err("ADD of a URL is not supported; use RUN curl".to_owned());
    }
    if ARCHIVES.iter().any(|end| source.ends_with(end)) {
        return Err("ADD does not unpack archives; use COPY, and RUN tar".to_owned());
    }
    Ok(())
}
