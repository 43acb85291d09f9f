-- The name behind the rows that a page of a list may read.
--
-- $1 the first name   $2 the first name after the range, NULL: there is none   $3 maximum number of rows
-- → name, no row: the range has fewer rows
SELECT name
FROM {locks}
WHERE name >= $1::bytea AND ($2::bytea IS NULL OR name < $2::bytea)
ORDER BY name
OFFSET $3::bigint
LIMIT 1
