//! Users and groups, read from the image's `/etc/passwd` and `/etc/group`. A static binary has no NSS, and an image's own
//! files are what its tools go by.

use std::{collections::HashMap, fs, io, path::PathBuf};

use thiserror::Error;

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";

/// A user that processes run as and files belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Login name.
    pub name: String,
    /// User id.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// Every group, the primary one included.
    pub groups: Vec<u32>,
    /// Home folder.
    pub home: PathBuf,
}

/// Why there is no such user.
#[derive(Debug, Error)]
pub enum LookupError {
    /// No line of `/etc/passwd` has the name.
    #[error("invalid username: '{0}'")]
    Unknown(String),
    /// `/etc/passwd` or `/etc/group` cannot be read.
    #[error("cannot read the guest's users: {0}")]
    Unreadable(#[from] io::Error),
}

/// Finds a user by name, or by number as images' `USER 1000` does.
pub fn lookup(name: &str) -> Result<User, LookupError> {
    let passwd = fs::read_to_string(PASSWD)?;
    let group = match fs::read_to_string(GROUP) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        read => read?,
    };
    find(&passwd, &group, name).ok_or_else(|| LookupError::Unknown(name.to_owned()))
}

fn find(passwd: &str, group: &str, name: &str) -> Option<User> {
    let number = name.parse::<u32>().ok();
    let account = accounts(passwd)
        .find(|account| account.name == name)
        .or_else(|| accounts(passwd).find(|account| Some(account.uid) == number));
    let (name, uid, gid, home) = match (account, number) {
        (Some(account), _) => (account.name, account.uid, account.gid, account.home),
        // A number without an account is root's group and has no home, as container engines have it.
        (None, Some(uid)) => (name, uid, 0, "/"),
        (None, None) => return None,
    };
    let mut groups = vec![gid];
    for line in group.lines() {
        let mut fields = line.split(':');
        let id = fields.nth(2).and_then(|id| id.parse().ok());
        let is_member = fields.next().is_some_and(|members| members.split(',').any(|member| member == name));
        match id {
            Some(id) if is_member && !groups.contains(&id) => groups.push(id),
            _ => {}
        }
    }
    Some(User { name: name.to_owned(), uid, gid, groups, home: PathBuf::from(home) })
}

struct Account<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

fn accounts(passwd: &str) -> impl Iterator<Item = Account<'_>> {
    passwd.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let [name, _, uid, gid, _, home, ..] = fields[..] else { return None };
        let home = if home.is_empty() { "/" } else { home };
        Some(Account { name, uid: uid.parse().ok()?, gid: gid.parse().ok()?, home })
    })
}

/// Names of ids, for listings. Ids without a name stand for themselves.
#[derive(Clone, Debug, Default)]
pub struct Names {
    users: HashMap<u32, String>,
    groups: HashMap<u32, String>,
}

impl Names {
    /// Reads them anew; what cannot be read has no names.
    pub fn read() -> Self {
        let passwd = fs::read_to_string(PASSWD).unwrap_or_default();
        let group = fs::read_to_string(GROUP).unwrap_or_default();
        let mut names = Self::default();
        for account in accounts(&passwd) {
            names.users.entry(account.uid).or_insert_with(|| account.name.to_owned());
        }
        for line in group.lines() {
            let mut fields = line.split(':');
            if let (Some(name), Some(Ok(id))) = (fields.next(), fields.nth(1).map(str::parse)) {
                names.groups.entry(id).or_insert_with(|| name.to_owned());
            }
        }
        names
    }

    /// Name of a user.
    pub fn user(&self, uid: u32) -> String {
        self.users.get(&uid).cloned().unwrap_or_else(|| uid.to_string())
    }

    /// Name of a group.
    pub fn group(&self, gid: u32) -> String {
        self.groups.get(&gid).cloned().unwrap_or_else(|| gid.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/sh\nbroken\nx:y:z\nnohome:x:7:7::::\n";
    const GROUP: &str =
        "root:x:0:\nsudo:x:27:user,other\ndocker:x:999:user\nuser:x:1000:user\nnear:x:5:user2\n";

    #[test]
    fn users_have_their_groups() {
        let user = find(PASSWD, GROUP, "user").unwrap();
        assert_eq!((user.uid, user.gid, user.home.to_str().unwrap()), (1000, 1000, "/home/user"));
        assert_eq!(user.groups, [1000, 27, 999]);
        assert_eq!(find(PASSWD, GROUP, "1000").unwrap(), user);
        assert_eq!(find(PASSWD, GROUP, "nohome").unwrap().home, PathBuf::from("/"));
    }

    #[test]
    fn unknown_names_and_numbers() {
        assert!(find(PASSWD, GROUP, "root123").is_none());
        assert!(find(PASSWD, GROUP, "broken").is_none());
        assert!(find(PASSWD, GROUP, "").is_none());
        let bare = find(PASSWD, GROUP, "4242").unwrap();
        assert_eq!((bare.uid, bare.gid, bare.groups.as_slice()), (4242, 0, &[0][..]));
    }
}
