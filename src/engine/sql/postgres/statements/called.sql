-- Returns the called waiters of a process: the notification may have been lost.
--
-- $1 process
-- → owner
SELECT owner FROM {waiters} WHERE process = $1::text AND is_called
