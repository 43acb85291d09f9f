-- The first name after the rows that a page of a list may read.
--
-- $1 the first name   $2 the first name after the range   $3 maximum number of rows
-- → name; no row: the range has at most $3 rows
SELECT name
FROM {locks}
WHERE name >= $1::bytea AND name < $2::bytea
ORDER BY name
OFFSET $3::bigint
LIMIT 1
