//! Names of the machine: hostname, machine-id, resolvers.

use std::{fs, net::IpAddr, path::Path};

use super::{SystemError, files::replace};

/// The address that Debian's resolvers know the machine itself by.
const OWN_ADDRESS: &str = "127.0.1.1";
/// Marks the line of `/etc/hosts` that is ours.
const MARK: &str = "# this sandbox";

/// Whether a text can name a machine.
pub fn is_hostname(text: &str) -> bool {
    (1..=63).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// Writes `/etc/hostname`, and the line of `/etc/hosts` without which `sudo` complains that it cannot resolve its host.
pub fn write_hostname(root: &Path, hostname: &str) -> Result<(), SystemError> {
    replace(&root.join("etc/hostname"), &format!("{hostname}\n"))?;
    let hosts = root.join("etc/hosts");
    let present = fs::read_to_string(&hosts)
        .unwrap_or_else(|_| "127.0.0.1 localhost\n::1 localhost ip6-localhost\n".to_owned());
    let mut lines: Vec<&str> = present.lines().filter(|line| !line.ends_with(MARK)).collect();
    let own = format!("{OWN_ADDRESS} {hostname} {MARK}");
    lines.push(&own);
    replace(&hosts, &(lines.join("\n") + "\n"))
}

/// Writes `/etc/machine-id`, and D-Bus's copy where an image has one.
pub fn write_machine_id(root: &Path, id: &str) -> Result<(), SystemError> {
    let line = format!("{id}\n");
    replace(&root.join("etc/machine-id"), &line)?;
    let dbus = root.join("var/lib/dbus/machine-id");
    match dbus.symlink_metadata() {
        Ok(entry) if entry.is_file() => replace(&dbus, &line),
        _ => Ok(()),
    }
}

/// Writes `/etc/resolv.conf`.
pub fn write_resolvers(root: &Path, servers: &[IpAddr]) -> Result<(), SystemError> {
    let lines: String = servers.iter().map(|server| format!("nameserver {server}\n")).collect();
    replace(&root.join("etc/resolv.conf"), &lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_launch_replaces_the_name() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        fs::write(root.path().join("etc/hosts"), "127.0.0.1 localhost\n10.0.0.1 db\n").unwrap();
        write_hostname(root.path(), "one").unwrap();
        write_hostname(root.path(), "two").unwrap();
        let hosts = fs::read_to_string(root.path().join("etc/hosts")).unwrap();
        assert_eq!(hosts, "127.0.0.1 localhost\n10.0.0.1 db\n127.0.1.1 two # this sandbox\n");
        assert_eq!(fs::read_to_string(root.path().join("etc/hostname")).unwrap(), "two\n");
    }

    #[test]
    fn machine_id_and_resolvers() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("var/lib/dbus")).unwrap();
        fs::write(root.path().join("var/lib/dbus/machine-id"), "old\n").unwrap();
        let id = "0123456789abcdef0123456789abcdef";
        write_machine_id(root.path(), id).unwrap();
        for file in ["etc/machine-id", "var/lib/dbus/machine-id"] {
            assert_eq!(fs::read_to_string(root.path().join(file)).unwrap(), format!("{id}\n"));
        }
        write_resolvers(root.path(), &["1.1.1.1".parse().unwrap(), "::1".parse().unwrap()]).unwrap();
        assert_eq!(
            fs::read_to_string(root.path().join("etc/resolv.conf")).unwrap(),
            "nameserver 1.1.1.1\nnameserver ::1\n"
        );
    }
}
