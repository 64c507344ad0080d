//! Where an engine listens: a Unix socket in a private directory, an inherited socket, or TCP with a secret.

use std::{
    fs,
    io::{self, ErrorKind},
    net::{SocketAddr, TcpListener},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{
            fs::{DirBuilderExt, FileTypeExt, MetadataExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
};

use rustix::net::{AddressFamily, sockopt};

use crate::{
    error::{ConnectionError, EndpointError},
    handshake::Secret,
};

/// Most bytes of a path in `sun_path`, without the terminating zero.
pub const MAX_PATH_BYTES: usize = 107;

/// Where an engine listens.
#[derive(Clone, Debug)]
pub enum Endpoint {
    /// A Unix socket of this user.
    Unix(PathBuf),
    /// TCP, on this host or another.
    Tcp {
        /// Address and port.
        address: SocketAddr,
        /// The secret that both sides know.
        secret: Secret,
    },
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Tcp { address, .. } => address.fmt(f),
        }
    }
}

/// A socket that accepts connections.
#[derive(Debug)]
pub enum Listener {
    /// A Unix socket, for processes of the same user on this machine.
    Unix {
        /// The socket.
        socket: UnixListener,
        /// The socket's file, which is removed when the engine stops.
        file: Option<SocketFile>,
    },
    /// TCP, for processes anywhere that know the secret. The traffic is not encrypted: use it in private networks only.
    Tcp {
        /// The socket.
        socket: TcpListener,
        /// The secret that a client must know.
        secret: Secret,
    },
}

impl Listener {
    /// Listen on a new Unix socket. If its directory does not exist, create it for this user alone; an existing one
    /// must belong to this user alone. The socket of a dead process is replaced, that of a living one is not.
    ///
    /// # Errors
    /// The path cannot be used; says why.
    pub fn unix(path: &Path) -> Result<Self, EndpointError> {
        check_path(path)?;
        let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
        let directory = directory.ok_or_else(|| EndpointError::NotAFilePath { path: path.into() })?;
        let made_directory = make_private_directory(directory)?;
        let (socket, identity) = bind(path)?;
        let directory = made_directory.then(|| directory.into());
        Ok(Self::Unix { socket, file: Some(SocketFile { path: path.into(), identity, directory }) })
    }

    /// Take over a listening Unix socket from the process that started this one.
    ///
    /// # Errors
    /// The descriptor is not a listening Unix socket.
    pub fn inherited(fd: OwnedFd) -> Result<Self, EndpointError> {
        let is_unix = sockopt::socket_domain(&fd).is_ok_and(|domain| domain == AddressFamily::UNIX);
        if !is_unix || !sockopt::socket_acceptconn(&fd).unwrap_or(false) {
            return Err(EndpointError::NotAListener { fd: fd.as_raw_fd() });
        }
        Ok(Self::Unix { socket: UnixListener::from(fd), file: None })
    }

    /// Listen on TCP.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn tcp(address: SocketAddr, secret: Secret) -> Result<Self, EndpointError> {
        let socket = TcpListener::bind(address).map_err(|source| EndpointError::System {
            action: "listen on",
            what: address.to_string(),
            source,
        })?;
        Ok(Self::Tcp { socket, secret })
    }

    /// The address of a TCP listener, whose port the system may have chosen.
    #[must_use]
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        match self {
            Self::Unix { .. } => None,
            Self::Tcp { socket, .. } => socket.local_addr().ok(),
        }
    }
}

/// A socket's name in the file system. Dropping it removes the name if it still leads to our socket, and also the
/// directory if that was created for it.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode of the socket.
    identity: (u64, u64),
    directory: Option<PathBuf>,
}

impl SocketFile {
    /// The socket's path, even if the name has been removed.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the name still leads to the socket. Programs that clean up temporary files may remove the name, and then
    /// no client can reach the socket, although it still listens.
    #[must_use]
    pub fn is_there(&self) -> bool {
        fs::symlink_metadata(&self.path).is_ok_and(|metadata| identity_of(&metadata) == self.identity)
    }

    /// Listen again under the same name, in a new directory if the old one is gone too.
    ///
    /// # Errors
    /// The path cannot be used any more; says why.
    pub fn listen_again(&mut self) -> Result<UnixListener, EndpointError> {
        if let Some(directory) = self.path.parent()
            && make_private_directory(directory)?
        {
            self.directory = Some(directory.into());
        }
        let (socket, identity) = bind(&self.path)?;
        self.identity = identity;
        Ok(socket)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.is_there() {
            let _ = fs::remove_file(&self.path);
            if let Some(directory) = &self.directory {
                // Fails if the directory holds anything else, and must then stay.
                let _ = fs::remove_dir(directory);
            }
        }
    }
}

/// Bind a new socket to a name on which no living process listens; also returns its device and inode.
fn bind(path: &Path) -> Result<(UnixListener, (u64, u64)), EndpointError> {
    remove_stale_socket(path)?;
    let socket = UnixListener::bind(path).map_err(|source| match source.kind() {
        ErrorKind::AddrInUse => EndpointError::InUse { path: path.into() },
        _ => system("listen on", path, source),
    })?;
    let metadata = fs::symlink_metadata(path).map_err(|source| system("look at the socket", path, source))?;
    Ok((socket, identity_of(&metadata)))
}

fn identity_of(metadata: &fs::Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// # Errors
/// A socket address cannot hold the path.
pub(crate) fn check_path(path: &Path) -> Result<(), EndpointError> {
    let num_bytes = path.as_os_str().len();
    if num_bytes > MAX_PATH_BYTES {
        return Err(EndpointError::PathTooLong { path: path.into(), num_bytes, limit: MAX_PATH_BYTES });
    }
    if path.file_name().is_none() {
        return Err(EndpointError::NotAFilePath { path: path.into() });
    }
    Ok(())
}

/// Create the directory or check the existing one; returns whether it was created.
fn make_private_directory(directory: &Path) -> Result<bool, EndpointError> {
    match fs::DirBuilder::new().mode(0o700).create(directory) {
        Ok(()) => return Ok(true),
        Err(source) if source.kind() == ErrorKind::AlreadyExists => {}
        Err(source) => return Err(system("make the directory", directory, source)),
    }
    let metadata =
        fs::metadata(directory).map_err(|source| system("look at the directory", directory, source))?;
    check_private(directory, metadata.mode(), metadata.uid(), own_uid())?;
    Ok(false)
}

fn check_private(directory: &Path, mode: u32, owner_uid: u32, own_uid: u32) -> Result<(), EndpointError> {
    let mode = mode & 0o7777;
    let of_others = mode & 0o077;
    if owner_uid == own_uid && of_others == 0 {
        return Ok(());
    }
    Err(EndpointError::DirectoryNotPrivate { path: directory.into(), mode, owner_uid, own_uid })
}

fn remove_stale_socket(path: &Path) -> Result<(), EndpointError> {
    match fs::symlink_metadata(path) {
        Err(source) if source.kind() == ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(system("look at", path, source)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(EndpointError::NotASocket { path: path.into() });
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        // No process listens any more: the socket was left by a dead process.
        Err(source) if source.kind() == ErrorKind::ConnectionRefused => match fs::remove_file(path) {
            Err(source) if source.kind() != ErrorKind::NotFound => {
                Err(system("remove the old socket", path, source))
            }
            _ => Ok(()),
        },
        Err(source) if source.kind() == ErrorKind::NotFound => Ok(()),
        _ => Err(EndpointError::InUse { path: path.into() }),
    }
}

fn system(action: &'static str, path: &Path, source: io::Error) -> EndpointError {
    EndpointError::System { action, what: path.display().to_string(), source }
}

/// The effective user of this process.
pub(crate) fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Check which user's process is at the other end of a Unix socket, as the kernel reports it. Only our own user's
/// processes are accepted, not even root's.
pub(crate) fn check_peer(peer_uid: u32, own_uid: u32) -> Result<(), ConnectionError> {
    if peer_uid == own_uid { Ok(()) } else { Err(ConnectionError::ForeignUser { peer_uid, own_uid }) }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::{fs::PermissionsExt, net::UnixStream},
        path::PathBuf,
    };

    use super::{Listener, check_peer, check_private};
    use crate::error::{ConnectionError, EndpointError};

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("ipc-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        path
    }

    #[test]
    fn only_our_own_user_is_accepted() {
        assert!(check_peer(1000, 1000).is_ok());
        for peer_uid in [0, 1001] {
            let error = check_peer(peer_uid, 1000).expect_err("another user");
            assert!(matches!(error, ConnectionError::ForeignUser { own_uid: 1000, .. }), "{error}");
        }
    }

    #[test]
    fn a_directory_that_others_can_enter_is_refused() {
        let path = PathBuf::from("/somewhere");
        assert!(check_private(&path, 0o40700, 5, 5).is_ok());
        for (mode, owner) in [(0o40750, 5), (0o40701, 5), (0o40700, 6)] {
            let error = check_private(&path, mode, owner, 5).expect_err("not private");
            assert!(matches!(error, EndpointError::DirectoryNotPrivate { own_uid: 5, .. }), "{error}");
        }
        let directory = scratch("public");
        fs::create_dir(&directory).expect("a directory");
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).expect("permissions");
        let error = Listener::unix(&directory.join("s")).expect_err("not private");
        assert!(error.to_string().contains("mode 755"), "{error}");
        fs::remove_dir(&directory).expect("empty");
    }

    #[test]
    fn the_socket_and_its_directory_are_private_and_go_with_the_listener() {
        let directory = scratch("made");
        let path = directory.join("engine");
        let listener = Listener::unix(&path).expect("a listener");
        assert_eq!(fs::metadata(&directory).expect("made").permissions().mode() & 0o777, 0o700);
        let error = Listener::unix(&path).expect_err("in use");
        assert!(matches!(error, EndpointError::InUse { .. }), "{error}");
        drop(listener);
        assert!(!directory.exists());
    }

    #[test]
    fn a_dead_process_leaves_a_socket_that_is_replaced() {
        let directory = scratch("stale");
        let path = directory.join("engine");
        let Listener::Unix { socket, file } = Listener::unix(&path).expect("a listener") else {
            panic!("a Unix socket")
        };
        let _kept = std::mem::ManuallyDrop::new(file);
        drop(socket);
        assert!(path.exists(), "as after SIGKILL");
        let listener = Listener::unix(&path).expect("the old one is replaced");
        drop(listener);
        assert!(!path.exists());
        fs::write(&path, b"precious").expect("a file");
        let error = Listener::unix(&path).expect_err("no socket");
        assert!(matches!(error, EndpointError::NotASocket { .. }), "{error}");
        assert_eq!(fs::read(&path).expect("left alone"), b"precious");
        fs::remove_dir_all(&directory).expect("removed");
    }

    #[test]
    fn a_name_that_was_taken_away_is_made_again_and_goes_with_the_listener() {
        let directory = scratch("cleaned");
        let path = directory.join("engine");
        let Listener::Unix { file: Some(mut file), .. } = Listener::unix(&path).expect("a listener") else {
            panic!("a Unix socket with a name")
        };
        assert!(file.is_there());
        fs::remove_file(&path).expect("the socket alone");
        assert!(!file.is_there());
        drop(file.listen_again().expect("the directory is still there"));
        assert!(file.is_there());
        fs::remove_dir_all(&directory).expect("the directory, too");
        assert!(!file.is_there());
        let socket = file.listen_again().expect("all of it is made");
        assert_eq!(fs::metadata(&directory).expect("made").permissions().mode() & 0o777, 0o700);
        UnixStream::connect(&path).expect("it listens");
        fs::remove_dir_all(&directory).expect("once more");
        fs::create_dir(&directory).expect("by a stranger");
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).expect("permissions");
        let error = file.listen_again().expect_err("not private");
        assert!(matches!(error, EndpointError::DirectoryNotPrivate { .. }), "{error}");
        drop((socket, file));
        assert!(directory.exists(), "what is not ours stays");
        fs::remove_dir(&directory).expect("empty");
    }

    #[test]
    fn a_path_that_does_not_fit_says_so() {
        let path = std::env::temp_dir().join("x".repeat(120)).join("s");
        let error = Listener::unix(&path).expect_err("too long");
        assert!(error.to_string().contains("the limit is 107"), "{error}");
        let error = Listener::unix(&scratch("absent").join("deeper").join("s")).expect_err("no parent");
        assert!(matches!(error, EndpointError::System { action: "make the directory", .. }), "{error}");
        let error = Listener::unix("name-alone".as_ref()).expect_err("no directory");
        assert!(matches!(error, EndpointError::NotAFilePath { .. }), "{error}");
    }
}
