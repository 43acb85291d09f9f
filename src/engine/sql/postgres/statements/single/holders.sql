-- Reads the leases of names.
--
-- $1 names
-- → name, owner, rest of the lease
SELECT l.name, l.owner, (date_part('epoch', l.expires_at - clock_timestamp()) * 1e6)::bigint
FROM {locks} AS l
WHERE l.name = ANY($1::bytea[]) AND l.owner IS NOT NULL AND l.expires_at > clock_timestamp()
