-- Removes positions of owners, and those of names that expired some time ago.
--
-- $1 owners   $2 names   $3 how long an expired position is kept, in milliseconds
DELETE FROM {waiters} WHERE owner = ANY($1::text[])
  OR (name = ANY($2::bytea[]) AND alive_until < clock_timestamp() - $3::bigint * interval '1 millisecond')
