//! Users and groups of this host, from its files. Those of a directory service are not seen here.

use anyhow::{Context, Result};

const USERS: &str = "/etc/passwd";
const GROUPS: &str = "/etc/group";

/// The text of both files.
#[derive(Debug, Default)]
pub struct Accounts {
    pub users: String,
    pub groups: String,
}

impl Accounts {
    /// # Errors
    /// They cannot be read.
    pub fn read() -> Result<Accounts> {
        let read = |path: &str| std::fs::read_to_string(path).with_context(|| format!("read {path}"));
        Ok(Accounts { users: read(USERS)?, groups: read(GROUPS)? })
    }

    /// Name and own group of a user.
    fn user(&self, uid: u32) -> Option<(&str, u32)> {
        self.users.lines().find_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            let found: u32 = fields.nth(1)?.parse().ok()?;
            let gid = fields.next()?.parse().ok()?;
            (found == uid).then_some((name, gid))
        })
    }

    /// The groups in which a user is, and `gid`.
    pub fn groups_of(&self, uid: u32, gid: u32) -> Vec<u32> {
        let mut groups = vec![gid];
        let Some((name, own)) = self.user(uid) else { return groups };
        groups.push(own);
        groups.extend(self.groups.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let gid: u32 = fields.nth(2)?.parse().ok()?;
            fields.next()?.split(',').any(|member| member.trim() == name).then_some(gid)
        }));
        groups.sort_unstable();
        groups.dedup();
        groups
    }

    /// Whether a user is in a group.
    pub fn is_in(&self, uid: u32, gid: u32) -> bool {
        // Of the group that is asked about `groups_of` knows nothing.
        let Some((_, own)) = self.user(uid) else { return false };
        self.groups_of(uid, own).contains(&gid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_those_of_the_files() {
        let accounts = Accounts {
            users: "root:x:0:0::/:\n# x\nqemu:x:64055:108::/:\n".into(),
            groups: "root:x:0:\nkvm:x:107:a,qemu\ndisk:x:6:a\nodd\n".into(),
        };
        assert_eq!(accounts.groups_of(64055, 108), [107, 108]);
        assert_eq!(accounts.groups_of(7, 7), [7]);
        assert!(accounts.is_in(64055, 107) && accounts.is_in(64055, 108) && accounts.is_in(0, 0));
        assert!(!accounts.is_in(64055, 6) && !accounts.is_in(64055, 0) && !accounts.is_in(7, 7));
    }
}
