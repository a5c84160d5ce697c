//! Reading the configuration from its sources.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
};

use thiserror::Error;
use toml::{Table, Value};

use super::{
    Config, DEFAULTS,
    keys::{self, KEYS, Key, Kind},
};

/// Where the file is looked for when nobody names one. It may be missing.
pub const DEFAULT_FILE: &str = "/etc/aenv/config.toml";

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// This file.
    File(PathBuf),
    /// This variable.
    Environment(String),
    /// This flag.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Environment(name) => write!(f, "${name}"),
            Self::Flag(name) => f.write_str(name),
        }
    }
}

/// Why there is no usable configuration.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("the configuration file {path} cannot be read: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The refusal.
        source: std::io::Error,
    },
    /// The file is no TOML.
    #[error("{path} is not valid TOML: {message}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line, column and what is wrong.
        message: String,
    },
    /// There is no such key.
    #[error("{origin}: there is no key {name:?}{}", .nearest.map(|n| format!("; did you mean {n:?}?")).unwrap_or_default())]
    Unknown {
        /// Where it stands.
        origin: Origin,
        /// The key.
        name: String,
        /// The one that may have been meant.
        nearest: Option<&'static str>,
    },
    /// The value is of another kind.
    #[error("{origin}: {name} is {found}; it takes {expected}")]
    Kind {
        /// Where it stands.
        origin: Origin,
        /// The key.
        name: String,
        /// What stands there.
        found: String,
        /// What it takes.
        expected: String,
    },
    /// The values do not fit together.
    #[error("{0}")]
    Meaning(String),
}

/// What is read, in this order; later ones win.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The file; [`DEFAULT_FILE`] if it exists when `None`.
    pub file: Option<PathBuf>,
    /// The environment.
    pub environment: Vec<(String, String)>,
    /// Key and value of flags.
    pub flags: Vec<(String, String)>,
}

/// A configuration with the origin of each value.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The values.
    pub config: Config,
    /// The same by key, with where each came from. Keys that have no value are missing.
    pub values: BTreeMap<&'static str, (Value, Origin)>,
    /// Variables that look like keys but are none.
    pub unknown_variables: Vec<String>,
}

impl Loaded {
    /// One line for each key: name, value, origin. Secrets are not shown.
    pub fn print(&self) -> String {
        let mut text = String::new();
        for key in KEYS {
            let line = match self.values.get(key.name) {
                Some((_, origin)) if key.kind == Kind::Secret => {
                    format!("{} = \"***\"  # {origin}", key.name)
                }
                Some((value, origin)) => format!("{} = {value}  # {origin}", key.name),
                None => format!("# {} is not set: {}", key.name, key.about),
            };
            text.push_str(&line);
            text.push('\n');
        }
        text
    }
}

/// Reads all sources, checks every key and value, and checks that they fit together.
pub fn load(sources: &Sources) -> Result<Loaded, ConfigError> {
    let mut values = BTreeMap::new();
    let defaults = DEFAULTS.parse::<Table>().expect("a test parses the defaults");
    collect(&defaults, "", &Origin::Default, &mut values)?;

    if let Some(path) = file_of(sources)? {
        let text = std::fs::read_to_string(&path)
            .map_err(|source| ConfigError::Read { path: path.clone(), source })?;
        let table = text.parse::<Table>().map_err(|error| ConfigError::Syntax {
            path: path.clone(),
            message: error.to_string().trim_end().to_owned(),
        })?;
        collect(&table, "", &Origin::File(path), &mut values)?;
    }
    let unknown_variables = environment(&sources.environment, &mut values)?;
    for (name, text) in &sources.flags {
        let origin = Origin::Flag(format!("--set {name}"));
        let key = keys::find(name).ok_or_else(|| unknown(name, &origin))?;
        values.insert(key.name, (from_text(key, text, &origin)?, origin));
    }
    let config = build(&values)?;
    super::check::check(&config)?;
    Ok(Loaded { config, values, unknown_variables })
}

fn file_of(sources: &Sources) -> Result<Option<PathBuf>, ConfigError> {
    if let Some(path) = &sources.file {
        return Ok(Some(path.clone()));
    }
    let variable = sources.environment.iter().find(|(name, _)| name == "AENV_CONFIG_PATH");
    if let Some((_, path)) = variable.filter(|(_, path)| !path.is_empty()) {
        return Ok(Some(path.into()));
    }
    Ok(Path::new(DEFAULT_FILE).exists().then(|| DEFAULT_FILE.into()))
}

fn unknown(name: &str, origin: &Origin) -> ConfigError {
    ConfigError::Unknown { origin: origin.clone(), name: name.to_owned(), nearest: keys::nearest(name) }
}

fn collect(
    table: &Table,
    prefix: &str,
    origin: &Origin,
    values: &mut BTreeMap<&'static str, (Value, Origin)>,
) -> Result<(), ConfigError> {
    for (name, value) in table {
        let name = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        let is_section =
            KEYS.iter().any(|k| k.name.starts_with(&name) && k.name[name.len()..].starts_with('.'));
        match value {
            Value::Table(inner) if is_section => collect(inner, &name, origin, values)?,
            _ => {
                let key = keys::find(&name).ok_or_else(|| unknown(&name, origin))?;
                check_kind(key, value, origin)?;
                values.insert(key.name, (value.clone(), origin.clone()));
            }
        }
    }
    Ok(())
}

fn environment(
    variables: &[(String, String)],
    values: &mut BTreeMap<&'static str, (Value, Origin)>,
) -> Result<Vec<String>, ConfigError> {
    let mut strange = Vec::new();
    for (name, text) in variables {
        let key = match name.as_str() {
            "API_ADDR" => keys::find("api_addr"),
            "RUST_LOG" => keys::find("log.filter"),
            other if other.starts_with("AENV_") => {
                let key = KEYS.iter().find(|key| key.variable() == other.replace("__", "_"));
                if key.is_none() && !keys::OTHER_VARIABLES.contains(&other) {
                    strange.push(other.to_owned());
                }
                key
            }
            _ => None,
        };
        let Some(key) = key.filter(|_| !text.is_empty()) else { continue };
        let origin = Origin::Environment(name.clone());
        values.insert(key.name, (from_text(key, text, &origin)?, origin));
    }
    Ok(strange)
}

fn from_text(key: &Key, text: &str, origin: &Origin) -> Result<Value, ConfigError> {
    let value = match key.kind {
        Kind::Text | Kind::Secret | Kind::Choice(_) => Value::String(text.to_owned()),
        Kind::Integer => text.trim().parse().map_or_else(|_| Value::String(text.to_owned()), Value::Integer),
        Kind::Number => text.trim().parse().map_or_else(|_| Value::String(text.to_owned()), Value::Float),
        Kind::Bool => text.trim().parse().map_or_else(|_| Value::String(text.to_owned()), Value::Boolean),
        Kind::List => {
            let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
            Value::Array(items.map(|item| Value::String(item.to_owned())).collect())
        }
    };
    check_kind(key, &value, origin)?;
    Ok(value)
}

fn check_kind(key: &Key, value: &Value, origin: &Origin) -> Result<(), ConfigError> {
    let fits = match key.kind {
        Kind::Text | Kind::Secret => value.is_str(),
        Kind::Integer => value.as_integer().is_some_and(|n| n >= 0),
        Kind::Number => number(value).is_some_and(|n| n >= 0.0),
        Kind::Bool => value.is_bool(),
        Kind::List => value.as_array().is_some_and(|items| items.iter().all(Value::is_str)),
        Kind::Choice(choices) => value.as_str().is_some_and(|text| choices.contains(&text)),
    };
    if fits {
        return Ok(());
    }
    let expected = match key.kind {
        Kind::Text | Kind::Secret => "a text".to_owned(),
        Kind::Integer => "a whole number, 0 or more".to_owned(),
        Kind::Number => "a number, 0 or more".to_owned(),
        Kind::Bool => "true or false".to_owned(),
        Kind::List => "a list of texts".to_owned(),
        Kind::Choice(choices) => choices.join(" or "),
    };
    let found = if key.kind == Kind::Secret { "not a text".to_owned() } else { value.to_string() };
    Err(ConfigError::Kind { origin: origin.clone(), name: key.name.to_owned(), found, expected })
}

#[allow(clippy::cast_precision_loss, reason = "who writes such a number means no digit of it")]
fn number(value: &Value) -> Option<f64> {
    value.as_float().or_else(|| value.as_integer().map(|n| n as f64))
}

fn build(values: &BTreeMap<&'static str, (Value, Origin)>) -> Result<Config, ConfigError> {
    let mut root = Table::new();
    for (name, (value, _)) in values {
        let mut table = &mut root;
        let mut parts = name.split('.').peekable();
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                table.insert(part.to_owned(), value.clone());
                break;
            }
            let inner = table.entry(part).or_insert_with(|| Value::Table(Table::new()));
            table = inner.as_table_mut().expect("no key is the section of another, a test says");
        }
    }
    Config::deserialize_table(root)
}

impl Config {
    fn deserialize_table(table: Table) -> Result<Self, ConfigError> {
        table.try_into().map_err(|error: toml::de::Error| ConfigError::Meaning(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from_file(text: &str) -> Result<Loaded, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        std::fs::write(&path, text).unwrap();
        load(&Sources { file: Some(path), ..Sources::default() })
    }

    #[test]
    fn the_defaults_are_whole() {
        let loaded = from_file("").unwrap();
        assert_eq!(loaded.config.api_addr, "0.0.0.0:8000");
        assert_eq!(loaded.config.orchestrator.default_sandbox_timeout_secs, 300);
        assert!(loaded.values.values().all(|(_, origin)| *origin == Origin::Default));
    }

    #[test]
    fn every_key_can_be_set() {
        let sample = |key: &Key| match key.kind {
            Kind::Text | Kind::Secret => match key.name {
                "api_addr" | "p2p.listen_addr" => "127.0.0.1:1".to_owned(),
                n if n.ends_with("cidr") => "10.0.0.0/16".to_owned(),
                _ => "x".to_owned(),
            },
            Kind::Integer => "2".to_owned(),
            Kind::Bool => "false".to_owned(),
            Kind::List => if key.name.contains("cidrs") { "10.0.0.0/8" } else { "" }.to_owned(),
            Kind::Choice(choices) => choices[0].to_owned(),
            Kind::Number => "1.5".to_owned(),
        };
        let mut values = BTreeMap::new();
        for key in KEYS {
            let origin = Origin::Flag("test".to_owned());
            values.insert(key.name, (from_text(key, &sample(key), &origin).unwrap(), origin));
        }
        build(&values).expect("the struct knows every key of the table");
    }

    #[test]
    fn later_sources_win_and_say_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.toml");
        std::fs::write(&path, "api_addr = \"1.1.1.1:1\"\n[pool]\nlow_watermark = 3\nhigh_watermark = 9\n")
            .unwrap();
        let own = |pairs: &[(&str, &str)]| pairs.iter().map(|(a, b)| ((*a).into(), (*b).into())).collect();
        let loaded = load(&Sources {
            file: Some(path.clone()),
            environment: own(&[
                ("API_ADDR", "127.0.0.1:2"),
                ("AENV_POOL_LOW_WATERMARK", "4"),
                ("AENV_FOO", "x"),
            ]),
            flags: own(&[("pool.low_watermark", "5")]),
        })
        .unwrap();
        assert_eq!(loaded.config.api_addr, "127.0.0.1:2");
        assert_eq!(loaded.config.pool.low_watermark, 5);
        assert_eq!(loaded.config.pool.high_watermark, 9);
        assert_eq!(loaded.values["api_addr"].1, Origin::Environment("API_ADDR".into()));
        assert_eq!(loaded.values["pool.high_watermark"].1, Origin::File(path));
        assert_eq!(loaded.unknown_variables, ["AENV_FOO"]);
        assert!(
            loaded.print().contains("pool.low_watermark = 5  # --set pool.low_watermark"),
            "{}",
            loaded.print()
        );
    }

    #[test]
    fn an_unknown_key_names_the_nearest() {
        let error = from_file("[orchestrator]\ndefault_timeout_secs = 3\n").unwrap_err().to_string();
        assert!(error.contains("orchestrator.default_timeout_secs"), "{error}");
        assert!(error.contains("did you mean \"orchestrator.default_sandbox_timeout_secs\""), "{error}");
        assert!(matches!(from_file("[foo.bar]\nx = 1"), Err(ConfigError::Unknown { .. })));
        assert!(matches!(from_file("pool = 3"), Err(ConfigError::Unknown { .. })));
    }

    #[test]
    fn a_wrong_value_says_what_it_takes() {
        let error = from_file("engine = \"xen\"").unwrap_err().to_string();
        assert!(error.contains("auto or firecracker or qemu"), "{error}");
        let error = from_file("[machine]\nvcpu_count = \"two\"").unwrap_err().to_string();
        assert!(error.contains("machine.vcpu_count") && error.contains("whole number"), "{error}");
        assert!(matches!(from_file("= 3"), Err(ConfigError::Syntax { .. })));
    }

    #[test]
    fn secrets_are_not_printed() {
        let loaded = from_file("[backend.oss]\naccess_key_secret = \"hunter2\"").unwrap();
        assert!(!loaded.print().contains("hunter2"));
    }
}
