-- Function for --@include; no script by itself. Reads neither KEYS nor ARGV.
--
-- Returns a chunk from its JSON, or nil: not one of ours. Whoever can write to Redis may have put it there, and one such
-- entry must not hold up other batches.
local CHUNK_NUMBERS = {'start', 'end', 'first_line', 'lines', 'tokens', 'next_line', 'lease_ms', 'fence', 'done',
  'failed', 'attempts', 'queued_ms'}
local function chunk_of(text)
  local ok, chunk = pcall(cjson.decode, text)
  if not ok or type(chunk) ~= 'table' or type(chunk.state) ~= 'string' or type(chunk.owner) ~= 'string'
    or type(chunk.at_end) ~= 'boolean' then
    return nil
  end
  for _, name in ipairs(CHUNK_NUMBERS) do
    local value = chunk[name]
    if type(value) ~= 'number' or value ~= math.floor(value) then
      return nil
    end
  end
  if chunk.skip ~= nil and (type(chunk.skip) ~= 'number' or chunk.skip ~= math.floor(chunk.skip)) then
    return nil
  end
  return chunk
end
