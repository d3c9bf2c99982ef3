//! Names of the threads that serve a VM, as `top -H` shows them.

/// `TASK_COMM_LEN` of the kernel, without its end.
const NAME_LEN_MAX: usize = 15;

/// What `top -H` and `/proc` show of a VM's thread: as much of the VM's name as the kernel has room for, whole characters only.
pub fn name(kind: &str, vm: &str) -> String {
    let room = NAME_LEN_MAX - kind.len() - 1;
    format!("{kind}-{}", &vm[..vm.floor_char_boundary(room)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_a_name_of_whole_characters() {
        for (vm, expected) in
            [("web1", "vm-web1"), ("Datenbank-Süd", "vm-Datenbank-S"), ("a", "vm-a"), ("вебвебв", "vm-вебвеб")]
        {
            assert_eq!(name("vm", vm), expected);
        }
        assert_eq!(name("image", "Datenbank-Süd"), "image-Datenbank");
    }
}
