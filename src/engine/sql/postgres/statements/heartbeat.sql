-- Keeps the positions of a process alive, except for waiters that were called. Waits for no other transaction: that of a locked
-- position changes it.
--
-- $1 process   $2 liveness in milliseconds
WITH own AS MATERIALIZED (
  SELECT ticket FROM {waiters} WHERE process = $1::text AND NOT is_called FOR UPDATE SKIP LOCKED
)
UPDATE {waiters} AS w SET alive_until = clock_timestamp() + $2::bigint * interval '1 millisecond'
FROM own WHERE w.ticket = own.ticket
