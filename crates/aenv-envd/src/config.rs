//! Command line of the daemon.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use aenv_envd_api::PORT;

/// Shown after a mistake on the command line.
pub const USAGE: &str = "\
usage: aenv-envd [options]
  --bind ADDRESS    address to serve on (default 0.0.0.0)
  --port PORT       port to serve on (default 49983; 0: any free one)
  --host ADDRESS    who may call /init and /tunnel (default 169.254.0.22, the host's end of the link; repeatable)
  --no-system       leave clock, hostname and files below /etc alone (for runs outside a guest)";

/// The host's end of every guest's link.
const HOST_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(169, 254, 0, 22));

/// What the command line says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where to serve.
    pub listen: SocketAddr,
    hosts: Vec<IpAddr>,
    system: System,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum System {
    Own,
    Foreign,
}

impl Config {
    /// Parses the arguments (without the program's name).
    pub fn from_arguments(arguments: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let mut bind = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let mut port = PORT;
        let mut hosts = Vec::new();
        let mut system = System::Own;
        let mut arguments = arguments.into_iter();
        while let Some(option) = arguments.next() {
            let mut value = || arguments.next().ok_or_else(|| format!("{option} needs a value"));
            match option.as_str() {
                "--bind" => bind = parse(&option, &value()?)?,
                "--port" => port = parse(&option, &value()?)?,
                "--host" => hosts.push(parse(&option, &value()?)?),
                "--no-system" => system = System::Foreign,
                _ => return Err(format!("unknown option {option:?}")),
            }
        }
        if hosts.is_empty() {
            hosts.push(HOST_ADDRESS);
        }
        Ok(Self { listen: SocketAddr::new(bind, port), hosts, system })
    }

    /// Whether the machine's clock, names and `/etc` are envd's to set.
    pub fn touches_system(&self) -> bool {
        self.system == System::Own
    }

    /// Whether a peer is the host.
    pub fn is_host(&self, peer: IpAddr) -> bool {
        self.hosts.contains(&peer.to_canonical())
    }
}

fn parse<T: std::str::FromStr>(option: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{value:?} is no value for {option}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Config, String> {
        Config::from_arguments(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn defaults_serve_the_guest() {
        let config = parsed("").unwrap();
        assert_eq!(config.listen.to_string(), "0.0.0.0:49983");
        assert!(config.touches_system());
        assert!(config.is_host("169.254.0.22".parse().unwrap()));
        assert!(config.is_host("::ffff:169.254.0.22".parse().unwrap()));
        assert!(!config.is_host("127.0.0.1".parse().unwrap()));
    }

    #[test]
    fn options_and_mistakes() {
        let config = parsed("--bind 127.0.0.1 --port 0 --host 127.0.0.1 --no-system").unwrap();
        assert_eq!(config.listen.to_string(), "127.0.0.1:0");
        assert!(config.is_host("127.0.0.1".parse().unwrap()) && !config.touches_system());
        for bad in ["--port", "--port x", "--what"] {
            assert!(parsed(bad).is_err(), "{bad:?} was taken");
        }
    }
}
