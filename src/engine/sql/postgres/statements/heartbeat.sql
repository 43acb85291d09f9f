-- Keeps the positions of a process alive. Skips positions that another transaction has locked: that transaction writes them.
--
-- $1 process   $2 liveness in milliseconds   $3 the owners of positions that it does not keep
-- → owner of each
WITH own AS MATERIALIZED (
  SELECT ticket FROM {waiters} WHERE process = $1::text AND owner <> ALL ($3::text[]) FOR UPDATE SKIP LOCKED
)
UPDATE {waiters} AS w SET alive_until = clock_timestamp() + $2::bigint * interval '1 millisecond'
FROM own WHERE w.ticket = own.ticket
RETURNING w.owner
